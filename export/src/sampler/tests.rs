use super::*;

#[test]
fn one_request_of_many_is_timed() {
    let mut sampler = Sampler::new(true);
    for round in 0..2 * EVERY {
        sampler.taken(3);
        sampler.begun(1, 3, || if round < EVERY { Op::Read } else { Op::Write });
        sampler.done(4);
        sampler.done(3);
    }
    let latency = sampler.latency().unwrap();
    assert_eq!((latency.reads.len(), latency.writes.len(), latency.others.len()), (1, 1, 0));
    let timed = sampler.durations().map(|one| one.buckets.iter().sum::<u64>());
    assert_eq!(timed, [1, 1, 0, 0]);
    let mut sum = Latency::new();
    sum.add(latency);
    sum.add(latency);
    assert_eq!(sum.reads.len(), 2);
}

#[test]
fn a_request_whose_end_nobody_saw_is_forgotten() {
    let mut sampler = Sampler::new(true);
    sampler.begun(1, 3, || Op::Read);
    sampler.taken(3);
    sampler.done(3);
    assert_eq!(sampler.latency().unwrap().reads.len(), 0);
}

#[test]
fn one_that_is_off_never_looks_at_a_clock() {
    let mut sampler = Sampler::new(false);
    for slot in 0..1000 {
        sampler.begun(16, slot, || Op::Read);
        sampler.done(slot);
        assert_eq!(sampler.slot, NONE);
    }
    assert!(sampler.latency().is_none());
}
