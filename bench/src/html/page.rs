//! A page that needs nothing but itself: no script, no font, no picture from elsewhere.

use std::fmt::Write as _;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// How a page begins.
pub(crate) const HEAD: &str = "<!doctype html>";

/// A page being written.
pub(crate) struct Page {
    head: String,
    cards: String,
    body: String,
    foot: String,
}

/// When and how this was made: the date, and the command line.
pub(crate) fn origin() -> [String; 2] {
    let mut date = String::new();
    // Writing to a string cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut date));
    let date = date.split('.').next().unwrap_or_default().replace('T', " ");
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    let word = |word: std::ffi::OsString| {
        let word = word.to_string_lossy().into_owned();
        let is_plain = !word.is_empty() && word.chars().all(plain);
        if is_plain { word } else { format!("'{}'", word.replace('\'', r"'\''")) }
    };
    let words: Vec<_> = std::env::args_os().skip(1).map(word).collect();
    [format!("{date} UTC"), format!("ringway {}", words.join(" "))]
}

/// Text as HTML takes it.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

impl Page {
    /// A page with a title, and lines of plain text below it.
    pub(crate) fn new(title: &str, lines: &[String]) -> Self {
        let title = escape(title);
        let mut head = format!("<title>{title}</title>\n");
        head.push_str("<style>\n");
        head.push_str(include_str!("page.css"));
        head.push_str("</style>\n</head>\n<body>\n<main>\n");
        let mut page =
            Self { head, cards: String::new(), body: String::new(), foot: String::new() };
        // Writing to a string cannot fail.
        let _ = writeln!(page.head, "<h1>{title}</h1>");
        for line in lines {
            let _ = writeln!(page.head, "<p class=\"sub\">{}</p>", escape(line));
        }
        page
    }

    /// A line below the title that names a colour: a or b.
    pub(crate) fn key(&mut self, colour: char, text: &str) {
        let _ = writeln!(
            self.head,
            "<p class=\"sub\"><span class=\"key {colour}\"></span>{}</p>",
            escape(text)
        );
    }

    /// One figure that matters.
    pub(crate) fn card(&mut self, value: &str, name: &str) {
        let (value, name) = (escape(value), escape(name));
        let _ = writeln!(self.cards, "<div class=\"card\"><b>{value}</b><span>{name}</span></div>");
    }

    /// A picture; `classes` may be `half` (of the page's width) and `heat`.
    pub(crate) fn figure(&mut self, classes: &str, title: &str, caption: &str, svg: &str) {
        let _ = writeln!(
            self.body,
            "<figure class=\"{classes}\"><h2>{}</h2>\n<figcaption>{caption}</figcaption>\n{svg}\n\
             </figure>",
            escape(title)
        );
    }

    /// Bars one below the other with their names and values, from zero on; published ones stand back.
    /// A line stands at `even`, where nothing is won or lost.
    pub(crate) fn bars(
        &mut self,
        title: &str,
        caption: &str,
        bars: &[(String, f64)],
        even: Option<f64>,
    ) {
        let ends = || bars.iter().map(|(_, value)| *value).chain(even).chain([0.0]);
        let (low, high) = (ends().fold(0.0, f64::min), ends().fold(0.0, f64::max));
        let range = (high - low).max(f64::MIN_POSITIVE);
        let place = |value: f64| (value - low) / range * 100.0;
        // Few digits, but never so few that a small difference is none.
        let digits = if high.max(-low) < 20.0 { 2 } else { 1 };
        let _ = writeln!(
            self.body,
            "<figure><h2>{}</h2>\n<figcaption>{caption}</figcaption>\n<div class=\"bars\">",
            escape(title)
        );
        let even = even.map(|even| format!("<u style=\"left:{:.2}%\"></u>", place(even)));
        let even = even.unwrap_or_default();
        for (name, value) in bars {
            let class = if name.starts_with("published") { " class=\"published\"" } else { "" };
            let (from, to) = (place(value.min(0.0)), place(value.max(0.0)));
            let _ = writeln!(
                self.body,
                "<b{class}>{}</b><div{class}>{even}<i style=\"left:{from:.2}%;width:{:.2}%\"></i>\
                 <span style=\"left:{to:.2}%\">{value:.digits$}</span></div>",
                escape(name),
                to - from
            );
        }
        self.body.push_str("</div>\n</figure>\n");
    }

    /// A table; rows whose first cell begins with `published` stand back.
    pub(crate) fn table(
        &mut self,
        title: &str,
        head: &[String],
        rows: &[Vec<String>],
        notes: &[String],
    ) {
        let _ =
            writeln!(self.body, "<section><h2>{}</h2>\n<div class=\"wide\"><table>", escape(title));
        let cells = |cells: &[String], tag: &str| {
            cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect::<String>()
        };
        let _ = writeln!(self.body, "<thead><tr>{}</tr></thead><tbody>", cells(head, "th"));
        for row in rows {
            let published = row.first().is_some_and(|cell| cell.starts_with("published"));
            let class = if published { " class=\"published\"" } else { "" };
            let mut row = row.clone();
            row.resize(head.len().max(row.len()), String::new());
            let _ = writeln!(self.body, "<tr{class}>{}</tr>", cells(&row, "td"));
        }
        self.body.push_str("</tbody></table></div>\n");
        for note in notes {
            let _ = writeln!(self.body, "<p class=\"note\">{}</p>", escape(note));
        }
        self.body.push_str("</section>\n");
    }

    /// The last line.
    pub(crate) fn footer(&mut self, text: &str) {
        self.foot = escape(text);
    }

    pub(crate) fn finish(self) -> String {
        let Self { head, cards, body, foot } = self;
        let cards = if cards.is_empty() {
            "<p>&nbsp;</p>\n".to_owned()
        } else {
            format!("<div class=\"cards\">\n{cards}</div>\n")
        };
        format!(
            "{HEAD}\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n{head}{cards}\
             <div class=\"grid\">\n{body}</div>\n<footer>{foot}</footer>\n</main>\n</body>\n</html>\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_begin_at_zero_and_stay_inside() {
        let mut page = Page::new("t", &[]);
        let bars = [("published: <a>".to_owned(), 3.0), ("b".to_owned(), -1.0)];
        page.bars("bars", "", &bars, Some(1.0));
        page.bars("nothing", "", &[], None);
        page.bars("zero", "", &[("z".to_owned(), 0.0)], None);
        let text = page.finish();
        for part in [
            // From -1 to 3: zero is at a quarter.
            "<b class=\"published\">published: &lt;a&gt;</b>",
            "<u style=\"left:50.00%\"></u><i style=\"left:25.00%;width:75.00%\"></i>",
            "<i style=\"left:0.00%;width:25.00%\"></i><span style=\"left:25.00%\">-1.00</span>",
            "<i style=\"left:0.00%;width:0.00%\"></i><span style=\"left:0.00%\">0.00</span>",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(!text.contains("NaN") && !text.contains("http"));
    }

    #[test]
    fn short_rows_of_a_table_are_filled_up() {
        let mut page = Page::new("t", &[]);
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        page.table("t", &words(&["", "a", "b"]), &[words(&["row", "1"])], &[]);
        assert!(page.finish().contains("<tr><td>row</td><td>1</td><td></td></tr>"));
    }
}
