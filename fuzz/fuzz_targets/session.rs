//! A whole vhost-user session from arbitrary bytes, in process: messages with descriptors, memory,
//! queues that start and stop, requests in their rings.

#![no_main]

#[path = "../../export/tests/session_case/mod.rs"]
mod session_case;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    session_case::check(data);
});
