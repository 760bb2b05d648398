//! A driver made from arbitrary bytes against the device side of a split queue and the decoder,
//! judged by the oracle of `testkit/oracle`.
//!
//! Every input must end with both sides of one opinion: the same chains, the same requests, every
//! segment in guest memory, each head at most once in flight, nothing written but what the oracle
//! writes.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ringway_ring_oracle::check(data);
});
