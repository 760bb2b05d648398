//! Times as people read them.

/// Nanoseconds as microseconds, with as many digits as matter.
pub(crate) fn micros(nanos: f64) -> String {
    match nanos / 1e3 {
        us if us < 100.0 => format!("{us:.2}"),
        us if us < 1000.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}
