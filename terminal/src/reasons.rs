//! An error with all its reasons, on one line.

/// The words of an error and of what lies behind it, each once: many errors name their cause
/// themselves.
pub fn in_full(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let words = cause.to_string();
        if text.is_empty() {
            text = words;
        } else if !text.ends_with(&words) {
            text = format!("{text}: {words}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[derive(Debug, thiserror::Error)]
    #[error("disk.img: cannot open it: {source}")]
    struct Refused {
        source: std::io::Error,
    }

    #[test]
    fn each_reason_is_told_once() {
        let denied = || std::io::Error::from_raw_os_error(libc::EACCES);
        let error = anyhow::Error::new(Refused { source: denied() }).context("disk 3");
        let words = "disk 3: disk.img: cannot open it: Permission denied (os error 13)";
        assert_eq!(in_full(&error), words);
        let plain = Err::<(), _>(denied()).context("cannot read it").unwrap_err();
        assert_eq!(in_full(&plain), "cannot read it: Permission denied (os error 13)");
    }
}
