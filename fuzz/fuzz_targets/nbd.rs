//! A whole conversation of an NBD client from arbitrary bytes, against a server in process.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ringway_testkit::nbd::check(data);
});
