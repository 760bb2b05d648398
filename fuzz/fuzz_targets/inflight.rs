//! Recovery from a record of what is in flight that was torn or damaged by arbitrary bytes, judged by
//! an oracle that reads the record's bytes itself.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ringway_ring_oracle::inflight::check(data);
});
