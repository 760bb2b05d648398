//! A page that needs nothing but itself: no script, no font, no picture from elsewhere.

use std::fmt::Write as _;

/// A page being written.
pub(crate) struct Page {
    head: String,
    cards: String,
    body: String,
    foot: String,
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
            let _ = writeln!(self.body, "<tr{class}>{}</tr>", cells(row, "td"));
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
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n{head}{cards}\
             <div class=\"grid\">\n{body}</div>\n<footer>{foot}</footer>\n</main>\n</body>\n</html>\n"
        )
    }
}
