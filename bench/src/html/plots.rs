//! Pictures, drawn by `plotters` as SVG.
//!
//! The page has its colours from CSS, for light and dark. So what is drawn gets colours that stand
//! for variables, and these are put in their place afterwards.

use crate::counters::{Frames, ROWS_PER_OCTAVE};
use anyhow::{Result, anyhow};
use hdrhistogram::Histogram;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use ringway_terminal::short;

const INK: RGBColor = RGBColor(1, 2, 1);
const MUTED: RGBColor = RGBColor(1, 2, 2);
const GRID: RGBColor = RGBColor(1, 2, 3);
const SERIES: [RGBColor; 2] = [RGBColor(1, 2, 4), RGBColor(1, 2, 5)];
const VARIABLES: [(RGBColor, &str); 5] =
    [(INK, "--ink"), (MUTED, "--muted"), (GRID, "--grid"), (SERIES[0], "--a"), (SERIES[1], "--b")];

/// Shades of the heat map.
const SHADES: u8 = 10;

/// Bars of the latency histogram per factor of ten.
const BINS: f64 = 20.0;

/// Width and height of a picture, in its own units.
const HALF: (u32, u32) = (620, 330);
const FULL: (u32, u32) = (1180, 340);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Draws with colours that stand for variables; returns the SVG element.
fn draw(
    size: (u32, u32),
    name: &str,
    with: impl FnOnce(&Area<'_>) -> Result<()>,
) -> Result<String> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    with(&area)?;
    area.present().map_err(failed)?;
    drop(area);
    for (RGBColor(r, g, b), variable) in VARIABLES {
        let colour = format!("\"#{r:02X}{g:02X}{b:02X}\"");
        svg = svg.replace(&colour, &format!("\"var({variable})\""));
    }
    for shade in 0..SHADES {
        svg = svg.replace(&format!("\"#0103{shade:02X}\""), &format!("\"var(--h{shade})\""));
    }
    let begin = svg.find("<svg").unwrap_or(0);
    let label = format!("<svg role=\"img\" aria-label=\"{name}\"");
    Ok(svg[begin..].replacen("<svg", &label, 1))
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("a picture cannot be drawn: {error}")
}

fn text_style(colour: RGBColor, size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&colour)
}

/// Axes from the least to the greatest value, with lines and words at the `marks`.
fn axes<'a, 'b>(
    area: &'a Area<'b>,
    x: (f64, f64),
    y: (f64, f64),
    x_marks: &[(f64, String)],
    y_marks: &[(f64, String)],
) -> Result<Chart<'a, 'b>> {
    let mut chart = ChartBuilder::on(area)
        .margin_top(14)
        .margin_right(14)
        .set_label_area_size(LabelAreaPosition::Left, 62)
        .set_label_area_size(LabelAreaPosition::Bottom, 30)
        .build_cartesian_2d(x.0..x.1, y.0..y.1)
        .map_err(failed)?;
    let line =
        |from: (f64, f64), to: (f64, f64)| PathElement::new([from, to], GRID.stroke_width(1));
    let inside = |value: f64, (low, high): (f64, f64)| value >= low && value <= high;
    let x_marks: Vec<_> = x_marks.iter().filter(|mark| inside(mark.0, x)).collect();
    let y_marks: Vec<_> = y_marks.iter().filter(|mark| inside(mark.0, y)).collect();
    chart.draw_series(x_marks.iter().map(|m| line((m.0, y.0), (m.0, y.1)))).map_err(failed)?;
    chart.draw_series(y_marks.iter().map(|m| line((x.0, m.0), (x.1, m.0)))).map_err(failed)?;
    for (at, word) in x_marks {
        let (px, py) = chart.backend_coord(&(*at, y.0));
        let style = text_style(MUTED, 13).pos(Pos::new(HPos::Center, VPos::Top));
        area.draw_text(word, &style, (px, py + 8)).map_err(failed)?;
    }
    for (at, word) in y_marks {
        let (px, py) = chart.backend_coord(&(x.0, *at));
        let style = text_style(MUTED, 13).pos(Pos::new(HPos::Right, VPos::Center));
        area.draw_text(word, &style, (px - 9, py)).map_err(failed)?;
    }
    Ok(chart)
}

/// A mark of an axis: 0, 2.5 k, 300 k, 1.5 M.
fn short(number: f64) -> String {
    let (number, unit) = match number {
        n if n < 1e3 => (n, ""),
        n if n < 1e6 => (n / 1e3, " k"),
        n => (n / 1e6, " M"),
    };
    format!("{}{unit}", (number * 1000.0).round() / 1000.0)
}

/// A mark of the time axis.
fn time(seconds: f64) -> String {
    format!("{} s", (seconds * 1000.0).round() / 1000.0)
}

/// Round numbers from 0 up to at least `most`, some `count` of them.
fn round_marks(most: f64, count: u32, word: impl Fn(f64) -> String) -> (f64, Vec<(f64, String)>) {
    let rough = (most / f64::from(count)).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= rough * 0.999)
        .unwrap_or(power);
    let steps = (most / step * 0.999).ceil().max(1.0);
    let marks = std::iter::successors(Some(0.0), |at| Some(at + 1.0));
    let marks = marks.take_while(|at| *at <= steps).map(|at| (at * step, word(at * step)));
    (steps * step, marks.collect())
}

/// Powers of ten of nanoseconds, at `place(log10)`, as words.
fn decades(place: impl Fn(f64) -> f64) -> Vec<(f64, String)> {
    let words = ["1 ns", "10 ns", "100 ns", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms"];
    let words = words.into_iter().chain(["1 s", "10 s", "100 s", "1000 s"]);
    (0i32..).zip(words).map(|(power, word)| (place(power.into()), word.to_owned())).collect()
}

/// Latencies, in percent of requests by factor; one or two series.
///
/// # Errors
/// What the library says.
pub(super) fn latencies(series: &[Histogram<u64>]) -> Result<String> {
    let bin_of = |nanos: u64| ((nanos.max(1) as f64).log10() * BINS).floor();
    let mut bins = Vec::new();
    for histogram in series {
        let mut shares = std::collections::BTreeMap::<i64, f64>::new();
        for value in histogram.iter_recorded() {
            // A small number without a fraction.
            #[allow(clippy::cast_possible_truncation)]
            let bin = bin_of(value.value_iterated_to()) as i64;
            let share = value.count_since_last_iteration() as f64 / histogram.len() as f64;
            *shares.entry(bin).or_default() += share * 100.0;
        }
        bins.push(shares);
    }
    let all = || bins.iter().flat_map(|shares| shares.iter());
    // What is too rare to be seen would only make the rest narrow.
    let seen = || all().filter(|(_, share)| **share >= 0.02).map(|(bin, _)| *bin as f64 / BINS);
    let tail = series.iter().map(|h| (h.value_at_percentile(99.9).max(1) as f64).log10());
    let high = seen().chain(tail).fold(f64::NEG_INFINITY, f64::max) + 2.0 / BINS;
    let low = seen().fold(f64::INFINITY, f64::min).min(high - 1.0) - 1.0 / BINS;
    let most = all().fold(1.0, |top: f64, (_, share)| share.max(top));
    let (top, y_marks) = round_marks(most * 1.12, 4, |p| format!("{p} %"));
    let mut x_marks = decades(|log| log);
    if high - low < 2.2 {
        for (factor, part) in [(2.0f64, "2"), (5.0, "5")] {
            let between = decades(|log| log + factor.log10());
            x_marks.extend(between.into_iter().map(|(at, word)| (at, word.replacen('1', part, 1))));
        }
    }
    draw(HALF, "latency histogram", |area| {
        let mut chart = axes(area, (low, high), (0.0, top), &x_marks, &y_marks)?;
        for (shares, colour) in bins.iter().zip(SERIES) {
            let fill = if series.len() == 1 { colour.mix(0.9) } else { colour.mix(0.55) };
            let bars = shares.iter().map(|(bin, share)| {
                let from = (*bin as f64 / BINS).max(low);
                let to = ((*bin + 1) as f64 / BINS).min(high);
                Rectangle::new([(from, 0.0), (to.max(from), *share)], fill.filled())
            });
            chart.draw_series(bars).map_err(failed)?;
        }
        for (at, (histogram, colour)) in series.iter().zip(SERIES).enumerate() {
            for (row, percentile) in [50.0, 99.0, 99.9].into_iter().enumerate() {
                let nanos = histogram.value_at_percentile(percentile) as f64;
                let x = nanos.max(1.0).log10();
                if x < low || x > high {
                    continue;
                }
                let stroke = if series.len() == 1 { INK } else { colour };
                let line = PathElement::new([(x, 0.0), (x, top)], stroke.mix(0.65).stroke_width(1));
                chart.draw_series([line]).map_err(failed)?;
                let (px, py) = chart.backend_coord(&(x, top));
                let word = format!("p{percentile} {}", short::time(nanos));
                // Words near the right edge stand on the other side of their line.
                let right = px > i32::try_from(HALF.0).unwrap_or(0) - 130;
                let side = if right { HPos::Right } else { HPos::Left };
                let style = text_style(stroke, 12).pos(Pos::new(side, VPos::Top));
                let down = i32::try_from(row * 17 + at * 51).unwrap_or(0);
                let beside = if right { px - 5 } else { px + 5 };
                area.draw_text(&word, &style, (beside, py + 1 + down)).map_err(failed)?;
            }
        }
        Ok(())
    })
}

/// Requests per second over time; one or two series of rounds, one after the other.
///
/// # Errors
/// What the library says.
pub(super) fn over_time(series: &[Vec<&Frames>]) -> Result<String> {
    let mut lines: Vec<Vec<Vec<(f64, f64)>>> = Vec::new();
    let (mut end, mut most) = (0.0f64, 0.0f64);
    for rounds in series {
        let (mut pieces, mut from) = (Vec::new(), 0.0);
        for frames in rounds {
            let mut points = Vec::new();
            for frame in &frames.all {
                let iops = frame.done as f64 / frames.seconds;
                points.extend([(from, iops), (from + frames.seconds, iops)]);
                from += frames.seconds;
                most = most.max(iops);
            }
            pieces.push(points);
        }
        end = end.max(from);
        lines.push(pieces);
    }
    let (top, y_marks) = round_marks(most * 1.05, 4, short);
    let (_, x_marks) = round_marks(end, 8, time);
    draw(HALF, "IOPS over time", |area| {
        let mut chart = axes(area, (0.0, end.max(1e-9)), (0.0, top), &x_marks, &y_marks)?;
        for (pieces, colour) in lines.iter().zip(SERIES) {
            for points in pieces {
                if series.len() == 1 {
                    let area = AreaSeries::new(points.iter().copied(), 0.0, colour.mix(0.16));
                    chart.draw_series(area).map_err(failed)?;
                }
                let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
                chart.draw_series(line).map_err(failed)?;
            }
        }
        Ok(())
    })
}

/// Latency over time: the darker (on a dark page the lighter), the more requests.
///
/// # Errors
/// What the library says.
pub(super) fn heat_map(rounds: &[&Frames]) -> Result<String> {
    let columns: Vec<(f64, &[u64])> = rounds
        .iter()
        .flat_map(|frames| frames.all.iter().map(|frame| (frames.seconds, &frame.heat[..])))
        .collect();
    let rows = |heat: &[u64]| heat.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
    let high = columns.iter().map(|(_, heat)| rows(heat)).max().unwrap_or(0) + 1;
    let lowest = columns.iter().filter_map(|(_, heat)| heat.iter().position(|count| *count > 0));
    let low = lowest.min().unwrap_or(0).saturating_sub(1);
    let most = columns.iter().flat_map(|(_, heat)| heat.iter()).copied().max().unwrap_or(1);
    let end: f64 = columns.iter().map(|(seconds, _)| seconds).sum();
    let y_marks = decades(|log| log * 10f64.log2() * ROWS_PER_OCTAVE);
    let (_, x_marks) = round_marks(end, 8, time);
    draw(FULL, "latency heat map", |area| {
        let y = (low as f64, high as f64);
        let mut chart = axes(area, (0.0, end.max(1e-9)), y, &x_marks, &y_marks)?;
        let mut from = 0.0;
        for (seconds, heat) in columns {
            let shades: Vec<_> = heat.iter().map(|count| shade(*count, most)).collect();
            let mut row = 0;
            while row < shades.len() {
                let run = shades[row..].iter().take_while(|s| **s == shades[row]).count();
                if let Some(shade) = shades[row] {
                    let corners = [(from, row as f64), (from + seconds, (row + run) as f64)];
                    let cell = Rectangle::new(corners, RGBColor(1, 3, shade).filled());
                    chart.draw_series([cell]).map_err(failed)?;
                }
                row += run;
            }
            from += seconds;
        }
        Ok(())
    })
}

/// How dark a cell is; nothing for no request. Logarithmic: one request in a thousand is seen.
fn shade(count: u64, most: u64) -> Option<u8> {
    if count == 0 {
        return None;
    }
    let part = (count as f64).ln_1p() / (most.max(2) as f64).ln_1p();
    // Between 0 and 9.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let shade = (part * f64::from(SHADES) - 1e-9).floor() as u8;
    Some(shade.min(SHADES - 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::Tick;

    #[test]
    fn marks_are_round_and_reach_far_enough() {
        for (most, top, count) in [(1.0, 1.0, 5), (7.3, 8.0, 5), (130_000.0, 150_000.0, 4)] {
            let (reached, marks) = round_marks(most, 4, short);
            assert!((reached - top).abs() < 1e-9, "{most}: {reached}");
            assert_eq!(marks.len(), count, "{most}: {marks:?}");
        }
    }

    #[test]
    fn pictures_of_anything_have_no_colour_of_their_own() {
        let mut tick = Tick::default();
        let mut frames = Frames::new(0.1);
        for empty in [true, false] {
            if !empty {
                (1..2000).for_each(|i| {
                    tick.sides[0].count(512);
                    tick.sides[0].time(i, i * i);
                });
                frames.add(3, &tick);
            }
            let lat = tick.total().lat;
            for svg in [
                latencies(std::slice::from_ref(&lat)).unwrap(),
                latencies(&[lat.clone(), lat]).unwrap(),
                over_time(&[vec![&frames], vec![&frames]]).unwrap(),
                heat_map(&[&frames]).unwrap(),
            ] {
                assert!(svg.starts_with("<svg role") && svg.trim_end().ends_with("</svg>"));
                assert!(!svg.contains("\"#") && !svg.contains("NaN"), "{svg}");
                assert_eq!(svg.contains("http"), svg.contains("http://www.w3.org/2000/svg"));
            }
        }
    }

    #[test]
    fn rare_requests_are_seen_beside_many() {
        assert_eq!(shade(0, 1000), None);
        assert_eq!((shade(1, 1_000_000), shade(1_000_000, 1_000_000)), (Some(0), Some(9)));
        assert!(shade(1000, 1_000_000) > Some(3));
        assert_eq!(shade(1, 1), Some(6));
    }
}
