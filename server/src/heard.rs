//! What tests hear of the log.

use std::io;
use std::sync::{Arc, Mutex};

/// The lines that a test has this thread log.
pub(crate) fn heard(act: impl FnOnce()) -> Vec<String> {
    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let page = Page::default();
    let writer = page.clone();
    let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
    tracing::subscriber::with_default(lines.finish(), act);
    let text = String::from_utf8(page.0.lock().unwrap().clone()).unwrap();
    text.lines().map(str::to_owned).collect()
}
