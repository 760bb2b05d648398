//! Families of time series, written by `prometheus-client`.
//!
//! The library writes a label by five pieces, and those of a disk stand on each of its eighty lines. So label
//! sets are made once, as text, and handed to it in one piece or two (docs/adr/0026).

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use ringway_control::metrics::{Metric, MetricKind};
use ringway_control::protocol::Buckets;
use std::fmt::{self, Write as _};
use std::time::Duration;

/// Labels as the text has them: `disk="/run/a",operation="read"`.
pub(super) fn labels(names: &[&str], values: &[&str]) -> String {
    debug_assert_eq!(values.len(), names.len(), "{values:?} {names:?}");
    let mut text = String::new();
    for (name, value) in names.iter().zip(values) {
        let comma = if text.is_empty() { "" } else { "," };
        text.extend([comma, name, "=\""]);
        match value.contains(['\\', '"', '\n']) {
            true => text += &escape(value),
            false => text += value,
        }
        text.push('"');
    }
    text
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Where families go.
pub(super) struct Families<'a, 'b>(pub(super) &'a mut DescriptorEncoder<'b>);

impl Families<'_, '_> {
    pub(super) fn family(
        &mut self,
        metric: &Metric,
        fill: impl FnOnce(&mut Family<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let (name, kind) = match metric.kind {
            // Its last word is added to each of its lines.
            MetricKind::Counter => (metric.name.trim_end_matches("_total"), MetricType::Counter),
            MetricKind::Gauge => (metric.name, MetricType::Gauge),
            MetricKind::Histogram => (metric.name, MetricType::Histogram),
        };
        let encoder = self.0.encode_descriptor(name, metric.help, None, kind)?;
        fill(&mut Family { encoder, kind: metric.kind, names: metric.labels })
    }
}

/// The time series of one metric. Each has its labels as text, in one piece or several.
pub(super) struct Family<'a> {
    encoder: MetricEncoder<'a>,
    kind: MetricKind,
    names: &'static [&'static str],
}

impl Family<'_> {
    /// All labels of a series.
    pub(super) fn labels(&self, values: &[&str]) -> String {
        labels(self.names, values)
    }

    /// Those after the first one, for series that differ in that.
    pub(super) fn further(&self, values: &[&str]) -> String {
        String::from(",") + &labels(&self.names[1..], values)
    }

    fn with(
        &mut self,
        labels: &[&str],
        tell: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        match labels {
            [] => tell(&mut self.encoder),
            _ => tell(&mut self.encoder.encode_family(&Written(labels))?),
        }
    }

    pub(super) fn put(&mut self, labels: &[&str], value: u64) -> fmt::Result {
        let kind = self.kind;
        self.with(labels, |encoder| match kind {
            MetricKind::Counter => encoder.encode_counter::<NoLabelSet, _, u64>(&value, None),
            // A gauge of the library is signed, or has a point: exact up to 2^53.
            _ => match i64::try_from(value) {
                Ok(value) => encoder.encode_gauge(&value),
                Err(_) => encoder.encode_gauge(&f64::INFINITY),
            },
        })
    }

    pub(super) fn put_time(&mut self, labels: &[&str], time: Duration) -> fmt::Result {
        let (kind, seconds) = (self.kind, time.as_secs_f64());
        self.with(labels, |encoder| match kind {
            MetricKind::Counter => encoder.encode_counter::<NoLabelSet, _, u64>(&seconds, None),
            _ => encoder.encode_gauge(&seconds),
        })
    }

    /// Values are written in parts of `unit`.
    #[allow(clippy::cast_precision_loss)]
    pub(super) fn put_buckets(
        &mut self,
        labels: &[&str],
        counted: &Buckets,
        unit: f64,
    ) -> fmt::Result {
        let within: u64 = counted.buckets.iter().map(|(_, count)| count).sum();
        let beyond = (f64::INFINITY, counted.count.saturating_sub(within));
        let bounded = counted.buckets.iter().map(|&(bound, count)| (bound as f64 / unit, count));
        let buckets: Vec<_> = bounded.chain([beyond]).collect();
        let sum = counted.sum as f64 / unit;
        self.with(labels, |encoder| {
            encoder.encode_histogram::<NoLabelSet>(sum, counted.count, &buckets, None)
        })
    }
}

/// Labels that are text already. What the library takes for the name of a label it writes as it is.
struct Written<'a>(&'a [&'a str]);

impl EncodeLabelSet for Written<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        let mut label = encoder.encode_label();
        let mut key = label.encode_label_key()?;
        self.0.iter().try_for_each(|piece| key.write_str(piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e23_a_name_stays_within_its_quotes() {
        let odd = "a\"} 1\nforged{b=\"\\";
        let text = labels(&["disk", "image"], &[odd, "plain"]);
        assert_eq!(text, r#"disk="a\"} 1\nforged{b=\"\\",image="plain""#);
    }
}
