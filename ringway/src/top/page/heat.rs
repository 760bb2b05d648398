//! Latencies in rows of a heat map: two for each doubling, from 1 µs on.

use super::super::buckets::Buckets;

/// How many rows there are. The last one begins at 11.9 s and has no end.
pub(super) const ROWS: usize = 48;

/// Where each row begins, in nanoseconds. The first one has no beginning.
pub(super) const EDGES: [u64; ROWS] = {
    let mut edges = [0; ROWS];
    let mut row = 0;
    while row < ROWS {
        let whole = 1000 << (row / 2);
        edges[row] = if row % 2 == 0 { whole } else { whole * 14_142 / 10_000 };
        row += 1;
    }
    edges
};

/// How many values there are in each row that has any, rising.
pub(super) type Column = Box<[(u8, u32)]>;

/// The column of these values.
pub(super) fn column(values: &Buckets) -> Column {
    let mut rows: Vec<(u8, u32)> = Vec::new();
    for (value, count) in values.iter() {
        let row = EDGES.partition_point(|&edge| edge <= value).saturating_sub(1);
        let row = u8::try_from(row).expect("there are 48");
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        match rows.last_mut() {
            Some((last, sum)) if *last == row => *sum = sum.saturating_add(count),
            _ => rows.push((row, count)),
        }
    }
    rows.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_control::protocol::Spread;

    fn column_of(pairs: &[(u64, u64)]) -> Column {
        column(&Buckets::spread(&Spread { buckets: Some(pairs.into()), ..Spread::default() }))
    }

    #[test]
    fn each_value_is_in_the_row_that_begins_below_it() {
        assert!(EDGES.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!((EDGES[0], EDGES[1], EDGES[2], EDGES[20]), (1000, 1414, 2000, 1_024_000));
        assert_eq!(*column_of(&[]), []);
        // Below the first row and in it, on an edge, and beyond the last one.
        let all = [(3, 1), (1000, 2), (1413, 4), (1414, 8), (2_000_000, 16), (u64::MAX >> 1, 32)];
        assert_eq!(*column_of(&all), [(0, 7), (1, 8), (21, 16), (47, 32)]);
        assert_eq!(*column_of(&[(5000, u64::MAX)]), [(4, u32::MAX)]);
    }
}
