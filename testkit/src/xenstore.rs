//! A xenstore daemon in the test's own process, as far as tests need one.
//!
//! ```no_run
//! # fn main() -> std::io::Result<()> {
//! let store = ringway_testkit::FakeStore::default();
//! store.set("backend/vbd3/1/51712/params", "/disk.img");
//! store.listen("store.sock".as_ref())?;
//! # Ok(()) }
//! ```

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

/// The tree, and who watches it.
#[derive(Default)]
struct Tree {
    texts: BTreeMap<String, Vec<u8>>,
    watches: Vec<(String, String, UnixStream)>,
    transactions: u32,
    /// Keys that cannot be read, and why.
    errors: BTreeMap<String, &'static str>,
    /// Ends of transactions that are to fail.
    conflicts: u32,
    /// Transactions that were ended with success.
    committed: u32,
}

/// A daemon with any number of connections. Nothing that a transaction writes is seen before its end.
#[derive(Clone, Default)]
pub struct FakeStore(Arc<Mutex<Tree>>);

fn message(kind: u32, request: u32, tx: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap();
    let mut bytes: Vec<u8> =
        [kind, request, tx, len].iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend_from_slice(body);
    bytes
}

fn is_below(path: &str, watched: &str) -> bool {
    path.strip_prefix(watched).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl FakeStore {
    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.0.lock().unwrap()
    }

    /// A connection, served by a thread until it is dropped.
    ///
    /// # Panics
    /// Without descriptors.
    #[must_use]
    pub fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let store = self.clone();
        std::thread::spawn(move || store.serve(ours));
        theirs
    }

    /// Serves whoever connects to a socket file, until the test ends.
    ///
    /// # Errors
    /// What the host says to the file.
    pub fn listen(&self, path: &Path) -> io::Result<()> {
        let (listener, store) = (UnixListener::bind(path)?, self.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let store = store.clone();
                std::thread::spawn(move || store.serve(stream));
            }
        });
        Ok(())
    }

    /// The text at `path`.
    ///
    /// # Panics
    /// If it is no text.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<String> {
        self.tree().texts.get(path).map(|text| String::from_utf8(text.clone()).unwrap())
    }

    /// Writes as somebody else would; watches ring.
    pub fn set(&self, path: &str, text: &str) {
        self.tree().set(path, text.as_bytes().to_vec());
    }

    /// Removes as somebody else would; watches ring.
    pub fn remove(&self, path: &str) {
        self.tree().remove(path);
    }

    /// Rings the watches of `path`, though nothing changed.
    pub fn ring(&self, path: &str) {
        self.tree().ring(path);
    }

    /// From now on a key cannot be read, as the store says by this name; `None`: it can be again.
    pub fn set_error(&self, path: &str, name: Option<&'static str>) {
        let errors = &mut self.tree().errors;
        match name {
            Some(name) => errors.insert(path.into(), name),
            None => errors.remove(path),
        };
    }

    /// The next ends of transactions fail.
    pub fn make_conflicts(&self, count: u32) {
        self.tree().conflicts = count;
    }

    /// Transactions that came to an end.
    #[must_use]
    pub fn committed(&self) -> u32 {
        self.tree().committed
    }

    fn serve(&self, mut stream: UnixStream) {
        let mut pending: Vec<(String, Option<Vec<u8>>)> = Vec::new();
        loop {
            let mut header = [0; 16];
            if stream.read_exact(&mut header).is_err() {
                return;
            }
            let word =
                |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| header[at * 4 + byte]));
            let (kind, request, tx) = (word(0), word(1), word(2));
            let mut body = vec![0; word(3) as usize];
            stream.read_exact(&mut body).unwrap();
            let parts: Vec<&[u8]> = body.splitn(2, |byte| *byte == 0).collect();
            let path = String::from_utf8(parts[0].to_vec()).unwrap();
            let rest = parts.get(1).copied().unwrap_or_default();
            let mut tree = self.tree();
            let refused = tree.errors.get(&path).copied().filter(|_| matches!(kind, 1 | 2));
            let answer: Result<Vec<u8>, &str> = match kind {
                1 | 2 if refused.is_some() => Err(refused.unwrap_or_default()),
                1 => tree.list(&path),
                2 => {
                    let own = pending.iter().rev().find(|(other, _)| tx != 0 && *other == path);
                    let text = match own {
                        Some((_, text)) => text.clone(),
                        None => tree.texts.get(&path).cloned(),
                    };
                    text.ok_or("ENOENT")
                }
                4 => {
                    let token =
                        String::from_utf8(rest.strip_suffix(b"\0").unwrap().into()).unwrap();
                    tree.watches.push((path.clone(), token.clone(), stream.try_clone().unwrap()));
                    let event = message(15, 0, 0, format!("{path}\0{token}\0").as_bytes());
                    stream.write_all(&message(kind, request, tx, b"OK\0")).unwrap();
                    let _ = stream.write_all(&event);
                    continue;
                }
                6 => {
                    pending.clear();
                    tree.transactions += 1;
                    Ok(format!("{}\0", tree.transactions).into_bytes())
                }
                7 => {
                    let writes = std::mem::take(&mut pending);
                    if tree.conflicts > 0 {
                        tree.conflicts -= 1;
                        Err("EAGAIN")
                    } else {
                        if path == "T" {
                            tree.committed += 1;
                            for (path, text) in writes {
                                match text {
                                    Some(text) => tree.set(&path, text),
                                    None => tree.remove(&path),
                                }
                            }
                        }
                        Ok(b"OK\0".to_vec())
                    }
                }
                11 if path.starts_with("forbidden") => Err("EACCES"),
                11 if tx != 0 => {
                    pending.push((path, Some(rest.to_vec())));
                    Ok(b"OK\0".to_vec())
                }
                11 => {
                    tree.set(&path, rest.to_vec());
                    Ok(b"OK\0".to_vec())
                }
                13 => match tree.texts.keys().any(|other| is_below(other, &path)) {
                    true if tx != 0 => {
                        pending.push((path, None));
                        Ok(b"OK\0".to_vec())
                    }
                    true => {
                        tree.remove(&path);
                        Ok(b"OK\0".to_vec())
                    }
                    false => Err("ENOENT"),
                },
                _ => Err("ENOSYS"),
            };
            let (kind, body) = match answer {
                Ok(body) => (kind, body),
                Err(name) => (16, format!("{name}\0").into_bytes()),
            };
            if stream.write_all(&message(kind, request, tx, &body)).is_err() {
                return;
            }
        }
    }
}

impl Tree {
    fn set(&mut self, path: &str, text: Vec<u8>) {
        self.texts.insert(path.to_owned(), text);
        self.ring(path);
    }

    fn remove(&mut self, path: &str) {
        self.texts.retain(|other, _| !is_below(other, path));
        self.ring(path);
    }

    fn ring(&mut self, path: &str) {
        self.watches.retain_mut(|(watched, token, stream)| {
            // A removal rings the watches below it too.
            let body = match (is_below(path, watched), is_below(watched, path)) {
                (true, _) => format!("{path}\0{token}\0"),
                (_, true) => format!("{watched}\0{token}\0"),
                _ => return true,
            };
            stream.write_all(&message(15, 0, 0, body.as_bytes())).is_ok()
        });
    }

    fn list(&self, path: &str) -> Result<Vec<u8>, &'static str> {
        let mut names: Vec<&str> = self
            .texts
            .keys()
            .filter_map(|other| other.strip_prefix(path)?.strip_prefix('/')?.split('/').next())
            .collect();
        names.dedup();
        if names.is_empty() && !self.texts.contains_key(path) {
            return Err("ENOENT");
        }
        Ok(names.iter().flat_map(|name| [name.as_bytes(), b"\0"].concat()).collect())
    }
}
