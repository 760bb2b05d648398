//! Times as people read them.

/// Nanoseconds as microseconds, with as many digits as matter.
pub(crate) fn micros(nanos: f64) -> String {
    match nanos / 1e3 {
        us if us < 100.0 => format!("{us:.2}"),
        us if us < 1000.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

/// Nanoseconds in their largest unit: `850 ns`, `12.3 µs`, `1.25 s`.
pub(crate) fn duration(nanos: f64) -> String {
    let (number, unit) = match nanos {
        n if n < 1e3 => return format!("{n:.0} ns"),
        n if n < 1e6 => (n / 1e3, "µs"),
        n if n < 1e9 => (n / 1e6, "ms"),
        n => (n / 1e9, "s"),
    };
    match number {
        n if n < 10.0 => format!("{n:.2} {unit}"),
        n if n < 100.0 => format!("{n:.1} {unit}"),
        n => format!("{n:.0} {unit}"),
    }
}
