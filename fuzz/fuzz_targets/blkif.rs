//! A Xen front-end made from arbitrary bytes against the back side of a block ring, judged by an
//! oracle written from the C headers.

#![no_main]

#[path = "../../ring/tests/oracle/mod.rs"]
#[allow(dead_code)]
mod oracle;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    oracle::blkif::check(data);
});
