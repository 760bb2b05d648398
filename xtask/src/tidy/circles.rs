//! Files of a crate that use each other in a circle cannot be read one after the other.
//!
//! A file uses another when its code, tests left out, names an item that is defined there: by `use`,
//! by a path, or by a name that comes through `use …::*`. What is handed on (`pub use`) is followed to
//! its definition, and handing on is no use; nor is to declare a module.

use super::modules::{Crate, Place, flatten};
use super::source::{Text, is_punct};
use anyhow::Result;
use proc_macro2::{Spacing, TokenStream, TokenTree};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// For each file, the files it uses, and one item of each for which it does.
type Uses = Vec<BTreeMap<usize, String>>;

/// Looks for circles in each crate. `most` says of how many files they may be in which crate.
pub(super) fn circles(
    files: &[Text],
    most: &[(&str, usize)],
    found: &mut Vec<String>,
) -> Result<()> {
    let texts: HashMap<&str, &Text> = files.iter().map(|file| (file.path.as_str(), file)).collect();
    let roots = files
        .iter()
        .filter(|file| file.path.ends_with("/src/lib.rs") || file.path.ends_with("/src/main.rs"));
    for root in roots {
        let of = Crate::read(&root.path, &texts)?;
        let uses = uses(&of);
        let circles: Vec<_> = components(&uses).into_iter().filter(|of| of.len() > 1).collect();
        let count: usize = circles.iter().map(Vec::len).sum();
        let dir = root.path.split("/src/").next().unwrap_or_default();
        let allowed = most.iter().find(|(of, _)| *of == dir).map_or(0, |(_, most)| *most);
        if count <= allowed {
            continue;
        }
        for circle in &circles {
            let names: Vec<_> = circle.iter().map(|file| of.files[*file].as_str()).collect();
            found.push(format!(
                "{}: a circle of {} files ({} of this crate are in one, {allowed} may be): {}",
                names[0],
                circle.len(),
                count,
                steps(&of, &uses, circle)
            ));
        }
    }
    Ok(())
}

fn uses(of: &Crate) -> Uses {
    let mut uses = vec![BTreeMap::new(); of.files.len()];
    for (at, module) in of.modules.iter().enumerate() {
        let mut paths = module.imports.clone();
        paths_of(module.code.clone(), &mut paths);
        for path in &paths {
            if path.len() == 1 && !of.is_indirect(at, &path[0]) {
                continue;
            }
            if let Some(Place::Item(place, name)) = of.resolve(at, path) {
                let file = of.modules[place].file;
                if file != module.file {
                    uses[module.file].entry(file).or_insert(name);
                }
            }
        }
    }
    uses
}

/// Every path in code, also in what a macro is given and in a `use` within a function.
fn paths_of(tokens: TokenStream, paths: &mut Vec<Vec<String>>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Group(group) => paths_of(group.stream(), paths),
            TokenTree::Ident(word) if word == "use" => {
                let end = tokens[at..].iter().position(|token| is_punct(token, ';'));
                let end = end.map_or(tokens.len(), |end| at + end);
                let tree = tokens[at + 1..end].iter().cloned().collect();
                if let Ok(tree) = syn::parse2(tree) {
                    paths.extend(flatten(&tree).into_iter().map(|(path, _)| path));
                    at = end;
                }
            }
            // A field or a method is no path.
            TokenTree::Ident(_) if at > 0 && is_field(&tokens[..at]) => {}
            TokenTree::Ident(word) => {
                let mut path = vec![word.to_string()];
                while let Some(word) = next_of_path(&tokens[at + 1..]) {
                    path.push(word);
                    at += 3;
                }
                paths.push(path);
            }
            _ => {}
        }
        at += 1;
    }
}

/// Whether these tokens end with the dot before a field, and not with that of a range.
fn is_field(before: &[TokenTree]) -> bool {
    let dot = |token: Option<&TokenTree>| token.is_some_and(|token| is_punct(token, '.'));
    dot(before.last()) && !dot(before.iter().rev().nth(1))
}

/// The word after `::`.
fn next_of_path(tokens: &[TokenTree]) -> Option<String> {
    let [TokenTree::Punct(first), second, TokenTree::Ident(word), ..] = tokens else { return None };
    let colons =
        first.as_char() == ':' && first.spacing() == Spacing::Joint && is_punct(second, ':');
    colons.then(|| word.to_string())
}

/// The sets of files each of which leads to each other (Tarjan's way).
fn components(uses: &Uses) -> Vec<Vec<usize>> {
    struct Search<'a> {
        uses: &'a Uses,
        /// When a file was come to first, from one; and the earliest that it leads back to.
        first: Vec<usize>,
        back: Vec<usize>,
        stack: Vec<usize>,
        out: Vec<Vec<usize>>,
        clock: usize,
    }
    fn visit(search: &mut Search<'_>, file: usize) {
        search.clock += 1;
        search.first[file] = search.clock;
        search.back[file] = search.clock;
        search.stack.push(file);
        for next in search.uses[file].keys() {
            if search.first[*next] == 0 {
                visit(search, *next);
                search.back[file] = search.back[file].min(search.back[*next]);
            } else if search.stack.contains(next) {
                search.back[file] = search.back[file].min(search.first[*next]);
            }
        }
        if search.back[file] == search.first[file] {
            let at = search.stack.iter().position(|of| *of == file).unwrap_or_default();
            let mut one = search.stack.split_off(at);
            one.sort_unstable();
            search.out.push(one);
        }
    }
    let (first, back) = (vec![0; uses.len()], vec![0; uses.len()]);
    let mut search = Search { uses, first, back, stack: Vec::new(), out: Vec::new(), clock: 0 };
    for file in 0..uses.len() {
        if search.first[file] == 0 {
            visit(&mut search, file);
        }
    }
    search.out
}

/// The shortest way round from each of two files that use each other, or all steps of the circle.
fn steps(of: &Crate, uses: &Uses, circle: &[usize]) -> String {
    let routes: Vec<_> = circle.iter().filter_map(|file| way_round(uses, circle, *file)).collect();
    let mut said: Vec<String> = Vec::new();
    let short = |file: usize| of.files[file].split_once("/src/").map_or("", |(_, path)| path);
    for route in routes.iter().filter(|route| route.len() == 2 || route.len() == routes[0].len()) {
        for pair in route.iter().zip(route.iter().cycle().skip(1)) {
            let step =
                format!("{} uses {} of {}", short(*pair.0), uses[*pair.0][pair.1], short(*pair.1));
            if !said.contains(&step) {
                said.push(step);
            }
        }
    }
    said.join("; ")
}

/// The shortest way from a file back to itself.
fn way_round(uses: &Uses, circle: &[usize], from: usize) -> Option<Vec<usize>> {
    let mut queue = VecDeque::from([vec![from]]);
    let mut seen = Vec::new();
    while let Some(route) = queue.pop_front() {
        for next in uses[*route.last()?].keys().filter(|next| circle.contains(next)) {
            if *next == from {
                return Some(route);
            }
            if !seen.contains(next) {
                seen.push(*next);
                queue.push_back([route.clone(), vec![*next]].concat());
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)], most: &[(&str, usize)]) -> Vec<String> {
        let files: Vec<_> = files.iter().map(|(path, text)| Text::new(path, *text)).collect();
        let mut found = Vec::new();
        circles(&files, most, &mut found).unwrap();
        found
    }

    #[test]
    fn circles_are_found_by_imports_paths_and_names_handed_on() {
        let lib = ("a/src/lib.rs", "mod b; mod c; mod d; pub use b::B; pub use d::*;");
        let routes = [
            ("use super::c::C; pub struct B(C);", "use crate::B; pub struct C(B);"),
            (
                "pub fn b() { super::c::c!(); } pub fn B() { crate::c::c() }",
                "pub fn c() { use super::b::b; b() }",
            ),
            (
                "pub struct B; fn b() { info!(\"{}\", crate::c::C) }",
                "use super::*; const C: B = B;",
            ),
            (
                "pub struct B; mod inner { fn b(_: super::super::c::C) {} }",
                "use crate::{b::{self}}; struct C(b::B);",
            ),
        ];
        for (b, c) in routes {
            let files =
                [lib, ("a/src/b.rs", b), ("a/src/c.rs", c), ("a/src/d.rs", "pub struct D;")];
            let said = found(&files, &[]);
            assert_eq!(said.len(), 1, "{b} {c}: {said:?}");
            assert!(
                said[0].starts_with("a/src/b.rs: a circle of 2 files (2 of this crate"),
                "{said:?}"
            );
            assert_eq!(found(&files, &[("a", 2)]), [""; 0]);
            assert_eq!(found(&files, &[("a", 1)]).len(), 1);
        }
    }

    #[test]
    fn a_child_that_uses_what_its_parent_defines_is_a_circle_with_it() {
        let files = [
            ("a/src/lib.rs", "mod b;"),
            ("a/src/b/mod.rs", "mod c; use c::C; pub(crate) struct B(C);"),
            ("a/src/b/c.rs", "pub(super) struct C; impl super::B { fn d(&self) {} }"),
        ];
        let said = found(&files, &[]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(
            said[0].ends_with("b/mod.rs uses C of b/c.rs; b/c.rs uses B of b/mod.rs"),
            "{said:?}"
        );
    }

    #[test]
    fn tests_and_what_is_only_handed_on_make_no_circle() {
        let files = [
            ("a/src/lib.rs", "mod b; mod c; pub use b::B; pub use c::C; pub const N: u8 = 1;"),
            ("a/src/b.rs", "use crate::N; pub struct B; #[cfg(test)] mod tests { use crate::C; }"),
            (
                "a/src/c.rs",
                "use crate::B; pub struct C; impl C { fn c(&self) { self.b.C; other::b::B; } }",
            ),
        ];
        assert_eq!(found(&files, &[]), [""; 0]);
    }
}
