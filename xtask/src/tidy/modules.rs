//! The modules of one crate, the names in each, and in which file a path ends.

use super::source::{Text, without_tests};
use anyhow::{Context, Result};
use proc_macro2::TokenStream;
use quote::ToTokens;
use std::collections::HashMap;
use syn::{Item, UseTree, Visibility};

/// A module: a file, or one that stands within a file.
#[derive(Debug, Default)]
pub(super) struct Module {
    /// Its file, counted as [`Crate::files`] counts.
    pub(super) file: usize,
    parent: Option<usize>,
    children: HashMap<String, usize>,
    names: HashMap<String, Name>,
    /// What `use …::*` takes its names from.
    globs: Vec<Vec<String>>,
    /// Paths that it imports for itself. Those it hands on (`pub use`) are names only.
    pub(super) imports: Vec<Vec<String>>,
    /// Its items but modules and imports.
    pub(super) code: TokenStream,
}

#[derive(Clone, Debug)]
enum Name {
    Item,
    Alias(Vec<String>),
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Place {
    Module(usize),
    /// An item, and the module that defines it.
    Item(usize, String),
}

/// The modules of a crate that are built when it is not tested.
#[derive(Debug, Default)]
pub(super) struct Crate {
    pub(super) files: Vec<String>,
    pub(super) modules: Vec<Module>,
}

impl Crate {
    /// Reads a crate from its first file (`lib.rs` or `main.rs`) on.
    pub(super) fn read(root: &str, texts: &HashMap<&str, &Text>) -> Result<Self> {
        let mut of = Self::default();
        let dir = root.rsplit_once('/').map_or("", |(dir, _)| dir).to_owned();
        of.read_file(root, &dir, None, texts)?;
        Ok(of)
    }

    fn read_file(
        &mut self,
        path: &str,
        dir: &str,
        parent: Option<usize>,
        texts: &HashMap<&str, &Text>,
    ) -> Result<usize> {
        let text = texts.get(path).with_context(|| format!("there is no {path}"))?;
        let parsed: syn::File = syn::parse2(without_tests(text.tokens()?))
            .map_err(|why| anyhow::anyhow!("{path}: {why}"))?;
        self.files.push(path.to_owned());
        let file = self.files.len() - 1;
        self.read_items(parsed.items, file, dir, parent, texts)
    }

    fn read_items(
        &mut self,
        items: Vec<Item>,
        file: usize,
        dir: &str,
        parent: Option<usize>,
        texts: &HashMap<&str, &Text>,
    ) -> Result<usize> {
        let here = self.modules.len();
        self.modules.push(Module { file, parent, ..Module::default() });
        for item in items {
            match item {
                Item::Mod(module) => {
                    let name = module.ident.to_string();
                    let inner = format!("{dir}/{name}");
                    let child = match module.content {
                        Some((_, items)) => {
                            self.read_items(items, file, &inner, Some(here), texts)?
                        }
                        None => {
                            let (flat, deep) = (format!("{inner}.rs"), format!("{inner}/mod.rs"));
                            let path = if texts.contains_key(&*flat) { flat } else { deep };
                            self.read_file(&path, &inner, Some(here), texts)?
                        }
                    };
                    self.modules[here].children.insert(name, child);
                }
                Item::Use(item) => {
                    let private = matches!(item.vis, Visibility::Inherited);
                    self.modules[here].take_use(&item.tree, private);
                }
                item => {
                    if let Some(name) = name_of(&item) {
                        self.modules[here].names.insert(name, Name::Item);
                    }
                    self.modules[here].code.extend(item.into_token_stream());
                }
            }
        }
        Ok(here)
    }

    /// Where a path leads that is written in `module`, if it stays within the crate. Names that are
    /// only handed on are followed to where they are defined.
    pub(super) fn resolve(&self, module: usize, path: &[String]) -> Option<Place> {
        self.resolve_within(module, path, 16)
    }

    fn resolve_within(&self, module: usize, path: &[String], fuel: u32) -> Option<Place> {
        let fuel = fuel.checked_sub(1)?;
        let mut at = module;
        for (nth, word) in path.iter().enumerate() {
            let last = nth + 1 == path.len();
            match word.as_str() {
                "crate" if nth == 0 => at = 0,
                "self" => {}
                "super" => at = self.modules[at].parent?,
                _ => match self.step(at, word, last, fuel)? {
                    Place::Module(next) => at = next,
                    item @ Place::Item(..) => return Some(item),
                },
            }
        }
        Some(Place::Module(at))
    }

    fn step(&self, at: usize, word: &str, last: bool, fuel: u32) -> Option<Place> {
        let here = &self.modules[at];
        let named = here.names.get(word);
        // A module and a function may have the same name; what follows tells them apart.
        if let (Some(Name::Item), true) = (named, last) {
            return Some(Place::Item(at, word.to_owned()));
        }
        if let Some(child) = here.children.get(word) {
            return Some(Place::Module(*child));
        }
        match named {
            Some(Name::Item) => return Some(Place::Item(at, word.to_owned())),
            // `use log;` within `mod log` names a crate, not itself.
            Some(Name::Alias(path)) if path.len() > 1 || path[0] != word => {
                return self.resolve_within(at, path, fuel);
            }
            Some(Name::Alias(_)) => return None,
            None => {}
        }
        here.globs.iter().find_map(|glob| match self.resolve_within(at, glob, fuel)? {
            Place::Module(from) if from != at => self.step(from, word, last, fuel.checked_sub(1)?),
            _ => None,
        })
    }

    /// Whether a name alone, without a path, may stand for something of another file: it is handed
    /// on by `module`, or comes by `use …::*`.
    pub(super) fn is_indirect(&self, module: usize, word: &str) -> bool {
        let here = &self.modules[module];
        match here.names.get(word) {
            Some(Name::Alias(_)) => true,
            Some(Name::Item) => false,
            None => !here.globs.is_empty(),
        }
    }
}

impl Module {
    fn take_use(&mut self, tree: &UseTree, private: bool) {
        for (path, name) in flatten(tree) {
            match name {
                None => self.globs.push(path),
                Some(name) => {
                    if private {
                        self.imports.push(path.clone());
                    }
                    self.names.insert(name, Name::Alias(path));
                }
            }
        }
    }
}

/// Each path of a `use`, and the name it is known by; none for `*`.
pub(super) fn flatten(tree: &UseTree) -> Vec<(Vec<String>, Option<String>)> {
    fn walk(tree: &UseTree, before: &[String], out: &mut Vec<(Vec<String>, Option<String>)>) {
        let with = |word: &syn::Ident| {
            let mut path = before.to_vec();
            path.push(word.to_string());
            path
        };
        match tree {
            UseTree::Path(path) => walk(&path.tree, &with(&path.ident), out),
            UseTree::Name(name) if name.ident == "self" => {
                out.push((before.to_vec(), before.last().cloned()));
            }
            UseTree::Name(name) => out.push((with(&name.ident), Some(name.ident.to_string()))),
            UseTree::Rename(name) => out.push((with(&name.ident), Some(name.rename.to_string()))),
            UseTree::Glob(_) => out.push((before.to_vec(), None)),
            UseTree::Group(group) => {
                for tree in &group.items {
                    walk(tree, before, out);
                }
            }
        }
    }
    let mut out = Vec::new();
    walk(tree, &[], &mut out);
    out
}

fn name_of(item: &Item) -> Option<String> {
    Some(match item {
        Item::Const(item) => item.ident.to_string(),
        Item::Enum(item) => item.ident.to_string(),
        Item::Fn(item) => item.sig.ident.to_string(),
        Item::Static(item) => item.ident.to_string(),
        Item::Struct(item) => item.ident.to_string(),
        Item::Trait(item) => item.ident.to_string(),
        Item::Type(item) => item.ident.to_string(),
        Item::Union(item) => item.ident.to_string(),
        Item::Macro(item) => item.ident.as_ref()?.to_string(),
        _ => return None,
    })
}
