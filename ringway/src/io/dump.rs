//! Bytes as people read them.

use std::fmt::Write;

/// `00000200  5a 5a …  |ZZ…|`, 16 bytes a line; lines like the one before are a `*`.
#[derive(Debug, Default)]
pub(crate) struct Dump {
    last: Vec<u8>,
    starred: bool,
}

impl Dump {
    /// The lines for `bytes` at `offset`, which follow those given before.
    pub(crate) fn lines(&mut self, offset: u64, bytes: &[u8]) -> String {
        let mut text = String::new();
        for (at, line) in (offset..).step_by(16).zip(bytes.chunks(16)) {
            if line == self.last {
                if !self.starred {
                    text.push_str("*\n");
                }
                self.starred = true;
                continue;
            }
            (self.last, self.starred) = (line.to_vec(), false);
            // Writing to a string cannot fail.
            let _ = write!(text, "{at:08x} ");
            for column in 0..16 {
                let gap = if column % 8 == 0 { " " } else { "" };
                let _ = match line.get(column) {
                    Some(byte) => write!(text, "{gap}{byte:02x} "),
                    None => write!(text, "{gap}   "),
                };
            }
            let shown =
                |&b: &u8| if b.is_ascii_graphic() || b == b' ' { char::from(b) } else { '.' };
            let shown: String = line.iter().map(shown).collect();
            let _ = writeln!(text, " |{shown}|");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_show_place_bytes_and_letters() {
        let mut bytes = vec![0; 64];
        bytes[0] = b'R';
        bytes.extend(b"end");
        let text = Dump::default().lines(512, &bytes);
        let expected = "\
00000200  52 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00  |R...............|
00000210  00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00  |................|
*
00000240  65 6e 64                                          |end|
";
        assert_eq!(text, expected);
    }
}
