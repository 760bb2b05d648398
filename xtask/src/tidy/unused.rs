//! What a crate offers and nobody takes: the compiler takes each public item for used.
//!
//! An item is used when its name stands in the code of another file of the workspace (tests and
//! examples are code, handing on is no use), in an example of documentation or in a macro. A type is
//! used too where a public item of its own file speaks of it: who calls that has no need to name it.

use super::source::{Text, without_tests, words};
use anyhow::Result;
use proc_macro2::TokenStream;
use quote::ToTokens;
use std::collections::{BTreeSet, HashMap, HashSet};
use syn::{ImplItem, Item, Visibility};

/// A public item that another file should name.
struct Offered {
    name: String,
    is_type: bool,
}

/// What one file offers and says.
#[derive(Default)]
struct File {
    offered: Vec<Offered>,
    /// Words of its code but `pub use`.
    words: BTreeSet<String>,
    /// Words of what others see of its public items.
    seen: BTreeSet<String>,
    /// Words of its macros, which are code of other files.
    macros: BTreeSet<String>,
}

/// Looks for public items that nobody uses, but those that are `kept`, each with its reason.
pub(super) fn unused(files: &[Text], kept: &[(&str, &str)], found: &mut Vec<String>) -> Result<()> {
    let mut read = Vec::new();
    let mut examples = BTreeSet::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        words(examples_of(&file.text).parse().unwrap_or_default(), &mut examples);
        read.push((file.path.as_str(), read_file(file)?));
    }
    let mut places: HashMap<&str, u32> = HashMap::new();
    for (_, file) in &read {
        for word in &file.words {
            *places.entry(word).or_default() += 1;
        }
    }
    let kept_names: HashSet<_> = kept.iter().map(|(name, _)| *name).collect();
    for (path, file) in &read {
        for offered in &file.offered {
            let name = offered.name.as_str();
            let elsewhere = places.get(name).is_some_and(|places| *places > 1);
            let elsewhere = elsewhere || file.macros.contains(name) || examples.contains(name);
            let spoken_of = offered.is_type && file.seen.contains(name);
            if !elsewhere && !spoken_of && !kept_names.contains(name) {
                found.push(format!("{path}: {name} is public, and no other file uses it"));
            }
        }
    }
    for (name, _) in kept {
        let offered = read.iter().any(|(_, file)| file.offered.iter().any(|of| of.name == *name));
        if !offered {
            found.push(format!("xtask/src/tidy.rs: there is no {name} to keep"));
        }
    }
    Ok(())
}

fn read_file(text: &Text) -> Result<File> {
    let mut file = File::default();
    let tokens = text.tokens()?;
    if !text.path.contains("/src/") {
        words(tokens, &mut file.words);
        return Ok(file);
    }
    let whole: syn::File =
        syn::parse2(tokens.clone()).map_err(|why| anyhow::anyhow!("{}: {why}", text.path))?;
    for item in whole.items {
        said(item, &mut file.words);
    }
    let built: syn::File = syn::parse2(without_tests(tokens))?;
    for item in &built.items {
        offered(item, &mut file);
    }
    Ok(file)
}

/// The words of an item, but of what it only hands on.
fn said(item: Item, words_of: &mut BTreeSet<String>) {
    match item {
        Item::Use(item) if !matches!(item.vis, Visibility::Inherited) => {}
        Item::Mod(syn::ItemMod { content: Some((_, items)), .. }) => {
            for item in items {
                said(item, words_of);
            }
        }
        item => words(item.into_token_stream(), words_of),
    }
}

/// What others may name of an item, and what they see of it.
fn offered(item: &Item, file: &mut File) {
    let mut offer = |vis: &Visibility, name: &syn::Ident, is_type: bool, seen: TokenStream| {
        if matches!(vis, Visibility::Public(_)) {
            file.offered.push(Offered { name: name.to_string(), is_type });
            words(seen, &mut file.seen);
        }
    };
    let none = TokenStream::new();
    match item {
        Item::Const(item) => offer(&item.vis, &item.ident, false, item.ty.to_token_stream()),
        Item::Static(item) => offer(&item.vis, &item.ident, false, item.ty.to_token_stream()),
        Item::Fn(item) => offer(&item.vis, &item.sig.ident, false, item.sig.to_token_stream()),
        Item::Type(item) => offer(&item.vis, &item.ident, true, item.ty.to_token_stream()),
        Item::Enum(item) => offer(&item.vis, &item.ident, true, item.variants.to_token_stream()),
        Item::Union(item) => offer(&item.vis, &item.ident, true, none),
        Item::Struct(item) => {
            let public = item.fields.iter().filter(|of| matches!(of.vis, Visibility::Public(_)));
            let seen = public.map(|field| field.ty.to_token_stream()).collect();
            offer(&item.vis, &item.ident, true, seen);
        }
        Item::Trait(item) => {
            let seen = item.items.iter().map(ToTokens::to_token_stream).collect();
            offer(&item.vis, &item.ident, true, seen);
        }
        Item::Impl(of) if of.trait_.is_none() => {
            for item in &of.items {
                match item {
                    ImplItem::Fn(item) => {
                        offer(&item.vis, &item.sig.ident, false, item.sig.to_token_stream());
                    }
                    ImplItem::Const(item) => {
                        offer(&item.vis, &item.ident, false, item.ty.to_token_stream());
                    }
                    _ => {}
                }
            }
        }
        // What a trait's items are (`type Token = …`) is seen by who calls for the trait.
        Item::Impl(of) => {
            for item in &of.items {
                if let ImplItem::Type(item) = item {
                    words(item.ty.to_token_stream(), &mut file.seen);
                }
            }
            let of = of.trait_.iter().map(|(path, _)| path.to_token_stream()).collect();
            words(of, &mut file.seen);
        }
        Item::Macro(item) => words(item.to_token_stream(), &mut file.macros),
        Item::Mod(syn::ItemMod { content: Some((_, items)), .. }) => {
            for item in items {
                offered(item, file);
            }
        }
        _ => {}
    }
}

/// The code in the documentation of a file: what stands between fences of comments for documentation.
fn examples_of(text: &str) -> String {
    let mut inside = false;
    let mut code = String::new();
    for line in text.lines() {
        let line = line.trim_start();
        let Some(line) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else {
            inside = false;
            continue;
        };
        let line = line.trim_start();
        if line.starts_with("```") {
            inside = !inside && !line.starts_with("```text");
        } else if inside {
            code.push_str(line.trim_start_matches("# "));
            code.push('\n');
        }
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_items_that_nobody_names_are_found() {
        let lib = "mod a;\nmod b;\npub use a::{A, Alone, Shown};\n";
        let a = "pub struct A;\nimpl A {\n    pub fn lonely(&self) { self.lonely() }\n    \
                 pub fn called(&self) -> Result { helper() }\n    fn private(&self) {}\n}\n\
                 pub struct Result;\npub struct Alone;\n\
                 /// ```\n/// Shown.show();\n/// ```\npub struct Shown;\n/// Alone, lonely.\n\
                 pub const KEPT: u8 = 1;\npub const M: u8 = 2;\n\
                 macro_rules! m { () => { $crate::a::M } }\npub(crate) fn helper() {}\n\
                 #[cfg(test)]\npub fn for_tests() { Alone; }\n";
        let b = "use super::A;\nfn b(a: &A) { log!(a.called()); }\n";
        let files =
            [("a/src/lib.rs", lib), ("a/src/a.rs", a), ("a/src/b.rs", b), ("a/README.md", "Alone")];
        let files: Vec<_> = files.iter().map(|(path, text)| Text::new(path, *text)).collect();
        let mut found = Vec::new();
        unused(&files, &[("KEPT", "for strangers"), ("GONE", "was")], &mut found).unwrap();
        let want = [
            "a/src/a.rs: lonely is public, and no other file uses it",
            "a/src/a.rs: Alone is public, and no other file uses it",
            "xtask/src/tidy.rs: there is no GONE to keep",
        ];
        assert_eq!(found, want);
    }
}
