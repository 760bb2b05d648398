//! A fixed set of small integers, handed out and taken back.

/// A free list of tags `0..count`. All memory is taken at start.
///
/// A tag names a slot: the room kept for one request while it is in flight. An empty list means
/// "wait": the request stays where it is, in the ring.
///
/// # Invariants
/// 1. `free` holds each tag that is not handed out exactly once.
#[derive(Debug)]
pub struct TagList {
    free: Vec<u16>,
    count: u16,
}

impl TagList {
    /// A list with the tags `0..count`, all free; the lowest is handed out first, and a tag for the
    /// first time only while all lower ones are.
    #[must_use]
    pub fn new(count: u16) -> Self {
        Self { free: (0..count).rev().collect(), count }
    }

    /// Takes a tag, the one freed last: its memory is the warmest.
    #[inline]
    pub fn acquire(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Gives a tag back.
    #[inline]
    pub fn release(&mut self, tag: u16) {
        debug_assert!(tag < self.count, "tag {tag} was never handed out");
        debug_assert!(!self.free.contains(&tag), "tag {tag} is free already");
        self.free.push(tag);
    }

    /// How many tags are handed out.
    #[must_use]
    pub fn in_use(&self) -> usize {
        usize::from(self.count) - self.free.len()
    }

    /// How many tags there are.
    #[must_use]
    pub fn count(&self) -> u16 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hands_out_each_tag_once_and_takes_it_back() {
        let mut tags = TagList::new(3);
        let got: Vec<_> = std::iter::from_fn(|| tags.acquire()).collect();
        assert_eq!(got, [0, 1, 2]);
        assert_eq!(tags.in_use(), 3);
        tags.release(1);
        assert_eq!(tags.acquire(), Some(1));
        assert_eq!(tags.acquire(), None);
    }

    #[test]
    #[should_panic(expected = "free already")]
    #[cfg(debug_assertions)]
    fn a_tag_is_released_once() {
        let mut tags = TagList::new(2);
        let tag = tags.acquire().unwrap();
        tags.release(tag);
        tags.release(tag);
    }
}
