//! Configuration files from arbitrary bytes: each is a plan, or a message that names the file.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ringway_control::config::fuzz_case::check(data);
});
