//! Figures as short as they can be read, the same in all commands; shared with the benchmarks of `xtask`.

/// A count of something per second, short: 950, 23.4 k, 4.61 M.
pub fn count(number: f64) -> String {
    match number {
        n if n < 1e3 => format!("{n:.0}"),
        n if n < 1e5 => format!("{:.2} k", n / 1e3),
        n if n < 1e6 => format!("{:.1} k", n / 1e3),
        n => format!("{:.2} M", n / 1e6),
    }
}

/// Nanoseconds in three figures: `870 ns`, `12.3 µs`, `1.25 ms`, `2.10 s`.
pub fn time(nanos: f64) -> String {
    let short = |value: f64, unit: &str| match value {
        v if v < 9.995 => format!("{v:.2} {unit}"),
        v if v < 99.95 => format!("{v:.1} {unit}"),
        v => format!("{v:.0} {unit}"),
    };
    match nanos {
        n if n < 999.5 => format!("{n:.0} ns"),
        n if n < 999.5e3 => short(n / 1e3, "µs"),
        n if n < 999.5e6 => short(n / 1e6, "ms"),
        n => short(n / 1e9, "s"),
    }
}

/// How long something has been there, given in microseconds, in the two largest units: `5s`, `3m 20s`, `2h 5m`, `40d 1h`.
pub fn age(us: u64) -> String {
    let seconds = us / 1_000_000;
    match (seconds / 60, seconds / 3600, seconds / 86400) {
        (0, ..) => format!("{seconds}s"),
        (minutes, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (minutes, hours, 0) => format!("{hours}h {}m", minutes % 60),
        (_, hours, days) => format!("{days}d {}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_figures() {
        let times = [
            (0.0, "0 ns"),
            (870.0, "870 ns"),
            (999.9, "1.00 µs"),
            (9_994.0, "9.99 µs"),
            (9_996.0, "10.0 µs"),
            (12_345.0, "12.3 µs"),
            (99_960.0, "100 µs"),
            (999_499.0, "999 µs"),
            (1_250_000.0, "1.25 ms"),
            (999_600_000.0, "1.00 s"),
            (60e9, "60.0 s"),
        ];
        for (nanos, words) in times {
            assert_eq!(time(nanos), words, "{nanos}");
        }
    }

    #[test]
    fn ages_have_two_units() {
        let ages = [0, 59, 200, 7500, 3_459_600].map(|seconds| age(seconds * 1_000_000));
        assert_eq!(ages, ["0s", "59s", "3m 20s", "2h 5m", "40d 1h"]);
    }
}
