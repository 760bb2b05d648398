//! Pages of docs/ as manual pages: the few forms of Markdown that they use.

use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

/// A page `name` of `section` from Markdown, with this line under NAME.
pub(super) fn page(name: &str, section: &str, about: &str, markdown: &str) -> Vec<u8> {
    let mut roff = Roff::new();
    let source = concat!("ringway ", env!("CARGO_PKG_VERSION"));
    roff.control("TH", [&name.to_uppercase(), section, "", source, "Ringway"]);
    roff.control("SH", ["NAME"]).text([roman(format!("{name} - {about}"))]);
    roff.control("SH", ["DESCRIPTION"]);
    let mut lines = markdown.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(heading) = line.strip_prefix("### ") {
            roff.control("SS", [heading]);
        } else if let Some(heading) = line.strip_prefix("## ") {
            roff.control("SH", [heading.to_uppercase().as_str()]);
        } else if line.starts_with("# ") {
            // The page has its title.
        } else if line.starts_with("```") {
            roff.control("PP", []).control("nf", []);
            for line in lines.by_ref().take_while(|line| !line.starts_with("```")) {
                roff.text([roman(line)]);
            }
            roff.control("fi", []);
        } else if let Some(row) = line.strip_prefix('|') {
            let head = lines.next_if(|next| next.starts_with("|-")).is_some();
            if head {
                table_head(&mut roff, row);
            } else {
                table_row(&mut roff, row);
            }
        } else if let Some(item) = line.strip_prefix("- ") {
            roff.control("IP", ["\\(bu", "2"]).text(words(item));
        } else if line.is_empty() {
            roff.control("PP", []);
        } else {
            roff.text(words(line.trim_start()));
        }
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text([bold("ringway-ctl"), roman("(1), "), bold("ringway-serve"), roman("(1)")]);
    roff.control("PP", []);
    roff.text([roman("Pages whose names end in .md are in /usr/share/doc/ringway/docs, or in docs/ of the source.")]);
    roff.render().into_bytes()
}

/// What the first column holds, and the others if that is said.
fn table_head(roff: &mut Roff, row: &str) {
    let cells = row.trim_end_matches('|').split('|').map(str::trim).filter(|cell| !cell.is_empty());
    let cells: Vec<_> = cells.map(|cell| cell.replace('`', "")).collect();
    roff.control("PP", []).text([italic(cells.join(": ") + ":")]);
}

/// The first cell is the term, the others say what it is.
fn table_row(roff: &mut Roff, row: &str) {
    let cells: Vec<_> = row.trim_end_matches('|').split('|').map(str::trim).collect();
    let Some((term, rest)) = cells.split_first() else { return };
    roff.control("TP", []).text(words(term)).text(words(&rest.join(" ")));
}

/// Code and strong words in bold; links by their text.
fn words(text: &str) -> Vec<Inline> {
    let mut plain = String::new();
    let mut rest = text;
    // [text](address)
    while let Some((before, after)) = rest.split_once('[') {
        let link =
            after.split_once("](").and_then(|(text, to)| Some((text, to.split_once(')')?.1)));
        match link.filter(|(text, _)| !text.contains('[')) {
            Some((text, after)) => {
                plain.push_str(before);
                plain.push_str(text);
                rest = after;
            }
            None => {
                plain.push_str(before);
                plain.push('[');
                rest = after;
            }
        }
    }
    plain.push_str(rest);
    let strong = |(at, part): (usize, &str)| {
        if at % 2 == 1 { bold(part) } else { roman(part) }
    };
    plain.replace("**", "`").split('`').enumerate().map(strong).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_keeps_headings_terms_code_and_words() {
        let markdown = "# Title\n\nSee [the ADR](adr/1.md) on `list`.\n\n## The form\n\n```\n{\"a\":[1]}\n```\n\n\
                        | field | |\n|---|---|\n| `id` | a number |\n\n- one\n  more\n";
        let page = String::from_utf8(page("ringway-x", "7", "a test", markdown)).unwrap();
        for part in [
            ".TH RINGWAY-X 7",
            "See the ADR on \\fBlist\\fR.",
            ".SH \"THE FORM\"",
            ".nf\n{\"a\":[1]}\n.fi",
            ".PP\n\\fIfield:\\fR\n.TP\n\\fBid\\fR\na number",
            ".IP \\(bu 2\none\nmore",
        ] {
            assert!(page.contains(part), "no {part} in:\n{page}");
        }
        for part in ["---", "adr/"] {
            assert!(!page.contains(part), "{part} in:\n{page}");
        }
    }
}
