//! The parts of a table that were used last.

/// Parts of a table by their place in it, the latest last; at least two.
#[derive(Debug)]
pub(crate) struct Kept<T> {
    list: Vec<(usize, T)>,
    most: usize,
}

impl<T> Kept<T> {
    /// Keeps at most `bytes`, of parts of `part` bytes each.
    pub(crate) fn new(bytes: u64, part: u64) -> Self {
        let most = usize::try_from(bytes / part).unwrap_or(2).max(2);
        Self { list: Vec::new(), most }
    }

    /// A part, which is the latest from then on.
    pub(crate) fn get(&mut self, index: usize) -> Option<&mut T> {
        let at = self.list.iter().position(|kept| kept.0 == index)?;
        self.list[at..].rotate_left(1);
        self.list.last_mut().map(|kept| &mut kept.1)
    }

    /// A part, if it is kept.
    pub(crate) fn peek(&self, index: usize) -> Option<&T> {
        self.list.iter().find(|kept| kept.0 == index).map(|kept| &kept.1)
    }

    /// Keeps a part, in the place of what was used least lately.
    pub(crate) fn keep(&mut self, index: usize, part: T) {
        self.forget(index);
        if self.list.len() >= self.most {
            self.list.remove(0);
        }
        self.list.push((index, part));
    }

    pub(crate) fn forget(&mut self, index: usize) {
        self.list.retain(|kept| kept.0 != index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_least_lately_goes_first() {
        let mut kept = Kept::new(3, 1);
        (0..3).for_each(|index| kept.keep(index, index));
        assert_eq!(kept.get(0), Some(&mut 0));
        kept.keep(7, 7);
        assert_eq!((kept.peek(0), kept.peek(1), kept.peek(7)), (Some(&0), None, Some(&7)));
        kept.forget(0);
        assert_eq!(kept.get(0), None);
    }
}
