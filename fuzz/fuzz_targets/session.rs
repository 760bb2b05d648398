//! A whole vhost-user session from arbitrary bytes, in process: messages with descriptors, memory,
//! queues that start and stop, requests in their rings.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ringway_testkit::session_fuzz_case::check(data);
});
