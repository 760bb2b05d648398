use super::*;

#[test]
fn verify_spec_2_7_10_event_passed_at_the_wrap() {
    assert!(event_passed(0, 1, 0));
    assert!(!event_passed(1, 1, 0));
    assert!(event_passed(65535, 0, 65535));
    assert!(event_passed(65535, 3, 65530));
    assert!(!event_passed(65529, 3, 65530));
    assert!(!event_passed(5, 5, 5), "nothing new, nothing passed");
}
