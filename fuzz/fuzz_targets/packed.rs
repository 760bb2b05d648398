//! A driver made from arbitrary bytes against the device side of a packed queue, judged by an oracle
//! that counts descriptors.

#![no_main]

#[path = "../../ring/tests/oracle/mod.rs"]
#[allow(dead_code)]
mod oracle;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    oracle::packed::check(data);
});
