//! The files of the tree, and the tokens of those that are Rust.

use anyhow::{Context, Result};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::BTreeSet;
use std::fs;
use std::iter::Peekable;
use std::path::Path;

/// Text that is looked at: by extension, or by name.
const TEXT: &[&str] = &["rs", "toml", "md", "sh", "lock", "yml", "yaml"];
const SCRIPTS: &[&str] = &["demo", "test", ".ci/run", "e2e/guest/init"];
const SKIPPED: &[&str] = &[".git", "target", "corpus", "artifacts", "coverage"];

/// One file: its path from the root, and its text.
#[derive(Debug)]
pub(super) struct Text {
    pub(super) path: String,
    pub(super) text: String,
}

impl Text {
    #[cfg(test)]
    pub(super) fn new(path: &str, text: impl Into<String>) -> Self {
        Self { path: path.to_owned(), text: text.into() }
    }

    pub(super) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Its tokens; comments are none of them, those of documentation are strings.
    pub(super) fn tokens(&self) -> Result<TokenStream> {
        self.text.parse().map_err(|why| anyhow::anyhow!("{}: {why}", self.path))
    }
}

/// A text up to the tests within it, which are its end.
pub(super) fn code(text: &str) -> &str {
    let tests = concat!("#[cfg(", "test)]\nmod ");
    let begins = |at: &usize| {
        let line = text[at + tests.len()..].lines().next();
        line.is_some_and(|line| line.contains('{'))
    };
    let end = text.match_indices(tests).map(|(at, _)| at).find(begins);
    &text[..end.unwrap_or(text.len())]
}

/// Reads every file of text below `root`.
pub(super) fn collect(root: &Path) -> Result<Vec<Text>> {
    let mut files = Vec::new();
    collect_in(root, root, &mut files)?;
    Ok(files)
}

fn collect_in(root: &Path, dir: &Path, files: &mut Vec<Text>) -> Result<()> {
    let mut entries: Vec<_> = fs::read_dir(dir)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::path);
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let from_root = path.strip_prefix(root)?.to_string_lossy().into_owned();
        let kind = entry.file_type()?;
        if kind.is_dir() && !SKIPPED.contains(&name.as_str()) {
            collect_in(root, &path, files)?;
        } else if kind.is_file()
            && (SCRIPTS.contains(&from_root.as_str())
                || path.extension().is_some_and(|end| TEXT.iter().any(|text| end == *text)))
        {
            let text = fs::read_to_string(&path).with_context(|| from_root.clone())?;
            files.push(Text { path: from_root, text });
        }
    }
    Ok(())
}

/// The tokens but those of what is built for tests only: `#[cfg(test)]` and the item that follows.
pub(super) fn without_tests(tokens: TokenStream) -> TokenStream {
    let mut kept = Vec::new();
    let mut rest = tokens.into_iter().peekable();
    while let Some(token) = rest.next() {
        if is_punct(&token, '#') && rest.peek().is_some_and(is_for_tests) {
            skip_item(&mut rest);
            continue;
        }
        kept.push(match token {
            TokenTree::Group(group) => {
                let inside = without_tests(group.stream());
                TokenTree::Group(proc_macro2::Group::new(group.delimiter(), inside))
            }
            other => other,
        });
    }
    kept.into_iter().collect()
}

pub(super) fn is_punct(token: &TokenTree, what: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == what)
}

/// `[cfg(test)]`, also within `any` and `all`, but not within `not`.
fn is_for_tests(token: &TokenTree) -> bool {
    let TokenTree::Group(group) = token else { return false };
    let text: String = group.stream().to_string().split_whitespace().collect();
    let mut words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.next() == Some("cfg") && words.any(|word| word == "test") && !text.contains("not(test")
}

/// Leaves out what an attribute stands before: to its `;`, its `,` or the end of its braces.
fn skip_item(rest: &mut Peekable<impl Iterator<Item = TokenTree>>) {
    let (mut attribute, mut function) = (true, false);
    while let Some(token) = rest.next() {
        match &token {
            _ if is_punct(&token, '#') => attribute = true,
            TokenTree::Ident(word) => function |= word == "fn",
            TokenTree::Group(group) => {
                if group.delimiter() == Delimiter::Brace {
                    // `use a::{b, c};`
                    let _ = rest.next_if(|token| is_punct(token, ';'));
                    return;
                }
                attribute &= group.delimiter() != Delimiter::Bracket;
            }
            _ if attribute => {}
            _ if is_punct(&token, ';') => return,
            // `-> Result<(), Error>` is no end.
            _ if is_punct(&token, ',') && !function => return,
            _ => {}
        }
    }
}

/// Every word of the code, also of what a macro is given.
pub(super) fn words(tokens: TokenStream, words: &mut BTreeSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => {
                words.insert(ident.to_string());
            }
            TokenTree::Group(group) => self::words(group.stream(), words),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_for_tests_is_left_out() {
        let text = "use a; #[cfg(test)] use b::{c, d}; #[cfg(not(test))] use e; #[cfg(any(test, loom))] \
                    #[derive(Debug)] struct F { g: [u8; 2] } impl H { #[cfg(test)] fn i(&self) -> R<(), b> { j(); } \
                    fn k(&self) {} } #[cfg(test)] mod tests; fn l() { m! { n } }";
        let mut found = BTreeSet::new();
        words(without_tests(text.parse().unwrap()), &mut found);
        let want =
            ["H", "a", "cfg", "e", "fn", "impl", "k", "l", "m", "n", "not", "self", "test", "use"];
        assert_eq!(found.into_iter().collect::<Vec<_>>(), want);
    }
}
