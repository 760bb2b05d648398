//! A Xen front-end made from arbitrary bytes against the back side of a block ring, judged by an
//! oracle written from the C headers.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ringway_ring_oracle::blkif::check(data);
});
