//! Requests made from arbitrary bytes against the decoder, judged by an oracle written from the
//! specification.

#![no_main]

#[path = "../../ring/tests/oracle/mod.rs"]
#[allow(dead_code)]
mod oracle;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    oracle::header::check(data);
});
