//! Requests at the control socket from arbitrary bytes: each is a request, or a problem with a
//! message.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ringway_control::request::fuzz_case::check(data);
});
