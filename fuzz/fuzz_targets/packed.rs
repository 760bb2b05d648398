//! A driver made from arbitrary bytes against the device side of a packed queue, judged by an oracle
//! that counts descriptors.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ringway_ring_oracle::packed::check(data);
});
