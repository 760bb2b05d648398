use super::*;

#[test]
fn a_range_never_overflows() {
    assert!(ByteRange::new(u64::MAX, 1).is_none());
    assert!(ByteRange::from_sector(u64::MAX / 512 + 1, 0).is_none());
    assert!(ByteRange::from_sector(u64::MAX / 512, 512).is_none());
    assert_eq!(ByteRange::from_sector(2, 512).unwrap().end(), 1536);
}

#[test]
fn widening_covers_and_aligns() {
    let range = ByteRange::new(513, 4096).unwrap().widened(4096).unwrap();
    assert_eq!((range.offset(), range.len()), (0, 8192));
    assert!(range.is_aligned(4096));
    assert!(ByteRange::new(u64::MAX - 10, 5).unwrap().widened(4096).is_none());
}

#[test]
fn ranges_that_only_touch_do_not_overlap() {
    let a = ByteRange::new(0, 512).unwrap();
    assert!(!a.overlaps(ByteRange::new(512, 512).unwrap()));
    assert!(a.overlaps(ByteRange::new(511, 1).unwrap()));
}

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
