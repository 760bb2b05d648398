use super::*;
use ringway_core::Segment;

#[test]
fn slots_begin_with_their_first_request_and_have_lists_of_their_own() {
    let mut slots = Slots::<()>::new(64, 8).unwrap();
    let places = (slots.slots.as_ptr(), slots.slow.as_ptr());
    for _ in 0..3 {
        let tags: Vec<_> = (0..4).map(|_| slots.acquire().unwrap()).collect();
        let mut sorted = tags.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3]);
        assert_eq!((slots.slots.len(), slots.slow.len()), (4, 4), "no more than were in flight");
        tags.into_iter().for_each(|tag| slots.abandon(tag));
    }
    let tags: Vec<_> = std::iter::from_fn(|| slots.acquire()).collect();
    assert_eq!((tags.len(), slots.slots.len(), slots.slow.len()), (64, 64, 64));
    assert_eq!((slots.slots.as_ptr(), slots.slow.as_ptr()), places, "nothing has moved");
    // Each has both lists to itself, as long as was asked for.
    for tag in 0..64u16 {
        let (slot, slow) = slots.both(tag);
        for list in [&mut slot.request.segments, &mut slow.part] {
            for _ in 0..8 {
                assert!(list.push(Segment { base: std::ptr::null_mut(), len: tag.into() }));
            }
            assert!(!list.push(Segment::EMPTY));
        }
    }
    for tag in 0..64u16 {
        let (slot, slow) = slots.both(tag);
        assert_eq!(slot.request.segments.bytes(), 8 * u64::from(tag));
        assert!(slow.part.as_slice().iter().all(|segment| segment.len == usize::from(tag)));
    }
}

#[test]
fn who_asked_the_images_thread_is_known() {
    let mut slots = Slots::new(8, 8).unwrap();
    assert!(slots.asked().is_empty());
    for (context, stage) in
        [(1, Stage::Part), (2, Stage::Asked), (3, Stage::Whole), (4, Stage::Asked)]
    {
        let tag = slots.acquire().unwrap();
        let slot = slots.get_mut(tag);
        (slot.context, slot.stage) = (Some(context), stage);
    }
    assert_eq!(slots.asked(), [1, 3]);
    // A slot keeps its stage until it is used again.
    slots.retire(1, Status::IoError);
    assert_eq!(slots.asked(), [3]);
}
