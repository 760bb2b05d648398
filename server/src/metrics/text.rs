//! The two text formats: OpenMetrics, by `prometheus-client`, and the older one, made of it.

use super::snapshot::Snapshot;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use std::fmt;

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// <https://prometheus.io/docs/specs/om/open_metrics_spec/>
    OpenMetrics,
    /// <https://prometheus.io/docs/instrumenting/exposition_formats/>
    Plain,
}

impl Format {
    pub(super) fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// As OpenMetrics, in the place of another text: that of a thousand disks has 7 MB, which would have to be
/// asked for and cleared each time.
pub(super) fn open_metrics(snapshot: Snapshot, mut text: String) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(snapshot));
    text.clear();
    let mut text = Text(text);
    // Writing to a string cannot fail.
    let _ = encode(&mut text, &registry);
    text.0
}

/// What is written is one character more often than not, which needs no copying of bytes.
struct Text(String);

impl fmt::Write for Text {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        match piece.as_bytes() {
            [byte] => self.0.push(char::from(*byte)),
            _ => self.0.push_str(piece),
        }
        Ok(())
    }

    fn write_char(&mut self, character: char) -> fmt::Result {
        self.0.push(character);
        Ok(())
    }
}

/// The same as it was before OpenMetrics: counters are described by their whole name, and there is no
/// mark at the end.
pub(super) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let described = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '));
        match (described, lines.peek()) {
            (Some((name, help)), Some(kind)) if kind.ends_with(" counter") => {
                plain.extend(["# HELP ", name, "_total ", help, "\n"]);
                plain.extend(["# TYPE ", name, "_total counter\n"]);
                lines.next();
            }
            _ if line == "# EOF" => {}
            _ => plain.extend([line, "\n"]),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_described_by_its_whole_name_in_the_older_format() {
        let text = "# HELP a Help.\n# TYPE a counter\na_total{b=\"# EOF\"} 1\n# HELP c x counter\n\
                    # TYPE c gauge\nc 2\n# EOF\n";
        let wanted = "# HELP a_total Help.\n# TYPE a_total counter\na_total{b=\"# EOF\"} 1\n\
                      # HELP c x counter\n# TYPE c gauge\nc 2\n";
        assert_eq!(plain(text), wanted);
    }
}
