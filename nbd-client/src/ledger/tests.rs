//! Counts that outlive a process.

use super::*;

fn page() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    file
}

/// A process begins to use an export: whether it is told that something may be lost.
fn begin(page: &File) -> (Ledger, bool) {
    let (ledger, mut told) = (Ledger::default(), false);
    ledger.keep(Counts::map(page, 256).unwrap(), || told = true);
    (ledger, told)
}

#[test]
fn f17_what_was_answered_and_not_flushed_is_known_to_the_next_process() {
    let page = page();
    let (first, told) = begin(&page);
    assert!(!told, "a new page");
    first.write_answered();
    // It is killed; its successor is told, once.
    let (second, told) = begin(&page);
    assert!(told && !second.is_owed());
    let (third, told) = begin(&page);
    assert!(!told, "it was told already");
    third.write_answered();
    third.flush_answered(third.mark());
    let (fourth, told) = begin(&page);
    assert!(!told, "it was flushed");
    // A flush that began before the last write does not cover it.
    fourth.write_answered();
    let mark = fourth.mark();
    fourth.write_answered();
    fourth.flush_answered(mark);
    assert!(begin(&page).1);
}

#[test]
fn f17_what_is_lost_with_a_connection_stays_lost_whatever_is_flushed_afterwards() {
    let page = page();
    let (first, _) = begin(&page);
    first.write_answered();
    assert!(first.connection_lost());
    assert!(!first.connection_lost(), "told once");
    first.flush_answered(first.mark());
    assert!(first.is_lost() && begin(&page).1);
}

#[test]
fn f17_another_word_of_the_page_is_left_alone() {
    use std::os::unix::fs::FileExt;
    let page = page();
    page.write_all_at(&[0xa5; 4096], 0).unwrap();
    page.write_all_at(&[0; 24], 256).unwrap();
    let (ledger, _) = begin(&page);
    ledger.write_answered();
    drop(ledger);
    let mut bytes = [0; 4096];
    page.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes[..256].iter().chain(&bytes[280..]).all(|&byte| byte == 0xa5));
}
