//! Figures as short as they can be read; shared with the benchmarks of `xtask`.

/// A count of something per second, short: 950, 23.4 k, 4.61 M.
pub fn count(number: f64) -> String {
    match number {
        n if n < 1e3 => format!("{n:.0}"),
        n if n < 1e5 => format!("{:.2} k", n / 1e3),
        n if n < 1e6 => format!("{:.1} k", n / 1e3),
        n => format!("{:.2} M", n / 1e6),
    }
}
