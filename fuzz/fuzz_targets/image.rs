//! Images from arbitrary bytes: each is refused, or opened, gone through and repaired within bounds.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    ringway_image::fuzz_case::check_case(data);
});
