//! Requests made from arbitrary bytes against the decoder, judged by an oracle written from the
//! specification.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ringway_ring_oracle::header::check(data);
});
