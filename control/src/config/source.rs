//! What an image's word names: a file, a disk of another server, or a disk that there is not.

use crate::size::Size;
use ringway_disk::Source;
use ringway_nbd_client::Target;
use ringway_rbd::{Access, Target as RbdTarget};
use std::path::Path;

/// How a word with a scheme is read.
type Read = fn(&str) -> Result<Source, String>;

/// The kinds of disks that have a scheme: what stands before the colon, and how such a word is read.
const SCHEMES: &[(&str, Read)] = &[
    ("null", null),
    ("sim", sim),
    (Target::SCHEMES[0], nbd),
    (Target::SCHEMES[1], nbd),
    (Target::SCHEMES[2], nbd),
    (Target::SCHEMES[3], nbd),
    (RbdTarget::SCHEME, rbd),
];

/// The scheme of an image's word; `None` for the path of a file. A path whose first part has a colon can be had as
/// `./a:b`.
fn scheme(image: &Path) -> Option<&str> {
    let (name, _) = image.to_str()?.split_once(':')?;
    let letters = |letter: char| letter.is_ascii_alphanumeric() || "+-.".contains(letter);
    let begins = name.starts_with(|first: char| first.is_ascii_alphabetic());
    (begins && name.chars().all(letters)).then_some(name)
}

/// True for the words that name no file: those with a scheme.
pub fn is_unreal(image: &Path) -> bool {
    scheme(image).is_some()
}

/// True if somebody else has what a word names: a server, a cluster.
pub fn is_elsewhere(image: &Path) -> bool {
    let is_here = |name| matches!(name, "null" | "sim");
    scheme(image)
        .is_some_and(|name| !is_here(name) && SCHEMES.iter().any(|(known, _)| *known == name))
}

/// `null:SIZE[,latency=TIME]`, `sim:MODEL:SIZE`, an export of an NBD server ([`Target`]), an image of a Ceph
/// cluster ([`RbdTarget`]), or a path. A file of such a name can be had as `./null:1G`.
pub fn source(image: &Path) -> Result<Source, String> {
    let Some(name) = scheme(image) else { return Ok(Source::Path(image.into())) };
    let word = image.to_str().unwrap_or_default();
    if let Some((_, read)) = SCHEMES.iter().find(|(known, _)| *known == name) {
        return read(word);
    }
    if name == "vhost-user" {
        return Err(format!(
            "{word}: that is a disk which is served already; ringway info, bench, copy and io take it"
        ));
    }
    let hint = meant(name).map(|meant| format!(" (did you mean '{meant}:'?)")).unwrap_or_default();
    Err(format!(
        "{word}: there is no kind of image '{name}:'{hint}. A file of that name is ./{word}"
    ))
}

fn null(word: &str) -> Result<Source, String> {
    let rest = word.strip_prefix("null:").unwrap_or_default();
    let (bytes, latency) = rest.split_once(",latency=").unwrap_or((rest, "0us"));
    let latency_us = microseconds(latency).map_err(|error| format!("{word}: {error}"))?;
    Ok(Source::Null { bytes: size(word, bytes)?, latency_us })
}

fn sim(word: &str) -> Result<Source, String> {
    let rest = word.strip_prefix("sim:").unwrap_or_default();
    let (model, bytes) = rest
        .split_once(':')
        .ok_or_else(|| format!("{word}: give a model and a size, such as sim:hdd:10G"))?;
    let model = model.parse().map_err(|error| format!("{word}: {error}"))?;
    Ok(Source::Sim { model, bytes: size(word, bytes)? })
}

fn nbd(word: &str) -> Result<Source, String> {
    word.parse::<Target>().map(Source::Nbd).map_err(|error| error.to_string())
}

fn rbd(word: &str) -> Result<Source, String> {
    let rbd = |target| Source::Rbd { target, access: Access::default() };
    word.parse::<RbdTarget>().map(rbd).map_err(|error| error.to_string())
}

/// The size that a part of `word` says.
fn size(word: &str, part: &str) -> Result<u64, String> {
    part.parse().map(|Size(bytes)| bytes).map_err(|error| format!("{word}: {error}"))
}

/// What a base is: a file, or an export of an NBD server. Its owner may have said that it `is_qcow2`.
///
/// # Errors
/// That it cannot be a base, and why.
pub fn base_source(base: &Path, is_qcow2: bool) -> Result<Source, String> {
    let found = source(base)?;
    let why = match &found {
        Source::Path(_) => return Ok(found),
        Source::Nbd(_) if !is_qcow2 => return Ok(found),
        Source::Nbd(_) => {
            "is an export, which is raw: leave base-format out, and have its server understand qcow2 \
             (`qemu-nbd -f qcow2`, `ringway nbd --format qcow2`)"
        }
        Source::Rbd { .. } => {
            "is an image of a Ceph cluster, which cannot be a base: each of its disks has a process of its own. \
             Serve it to NBD clients (`ringway nbd`), and name that export as the base"
        }
        Source::Null { .. } | Source::Sim { .. } | Source::Other { .. } => {
            "is no file: the base of a clone is one, or an export of an NBD server"
        }
    };
    Err(format!("{} {why}", base.display()))
}

/// The scheme that somebody meant: these words are too short to be judged as others are.
fn meant(name: &str) -> Option<&'static str> {
    let near = SCHEMES.iter().map(|&(known, _)| (strsim::osa_distance(name, known), known));
    near.min().filter(|(distance, known)| *distance * 3 <= known.len()).map(|(_, known)| known)
}

/// `100us` or `2ms`, in microseconds.
fn microseconds(word: &str) -> Result<u32, String> {
    let (number, factor) = match word.strip_suffix("us") {
        Some(number) => (number, 1),
        None => (word.strip_suffix("ms").unwrap_or_default(), 1000),
    };
    number
        .parse::<u32>()
        .ok()
        .and_then(|number| number.checked_mul(factor))
        .ok_or_else(|| format!("'{word}' is not a time: give 100us or 2ms"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_disk::SimModel;

    #[test]
    fn a_null_disk_has_a_size_and_anything_else_is_a_path() {
        assert_eq!(
            source(Path::new("null:1G")),
            Ok(Source::Null { bytes: 1 << 30, latency_us: 0 })
        );
        assert_eq!(source(Path::new("./null:x")), Ok(Source::Path("./null:x".into())));
        assert!(source(Path::new("null:big")).unwrap_err().contains("'big' is not a size"));
        let slow = Source::Null { bytes: 1 << 30, latency_us: 2000 };
        assert_eq!(source(Path::new("null:1G,latency=2ms")), Ok(slow));
        assert!(source(Path::new("null:1G,latency=2")).unwrap_err().contains("is not a time"));
        let hdd = Source::Sim { model: SimModel::Hdd, bytes: 1 << 30 };
        assert_eq!(source(Path::new("sim:hdd:1G")), Ok(hdd));
        assert!(source(Path::new("sim:tape:1G")).unwrap_err().contains("ram, ssd, hdd"));
        assert!(source(Path::new("sim:hdd")).unwrap_err().contains("sim:hdd:10G"));
    }

    #[test]
    fn what_has_a_scheme_is_no_file_and_an_unknown_one_is_told() {
        let target = "nbd:unix:/run/x.sock:disk".parse().unwrap();
        assert_eq!(source(Path::new("nbd:unix:/run/x.sock:disk")), Ok(Source::Nbd(target)));
        assert!(source(Path::new("nbds://h/x")).unwrap_err().contains("tls-certificates"));
        let (target, access) = ("rbd:pool/vm@snap".parse().unwrap(), Access::default());
        assert_eq!(source(Path::new("rbd:pool/vm@snap")), Ok(Source::Rbd { target, access }));
        assert!(source(Path::new("rbd:vm")).unwrap_err().contains("rbd:POOL/IMAGE"));
        let error = source(Path::new("ndb:unix:/x")).unwrap_err();
        let wanted = "ndb:unix:/x: there is no kind of image 'ndb:' (did you mean 'nbd:'?). A file of \
                      that name is ./ndb:unix:/x";
        assert_eq!(error, wanted);
        for path in ["./nbd:x", "/a:b", "a/b:c", "7:x", "vm-1_a:x", "nbd", "ä:x"] {
            assert_eq!(source(Path::new(path)), Ok(Source::Path(path.into())));
            assert!(!is_unreal(Path::new(path)));
        }
        for word in ["null:1G", "nbd://h/x", "vm:1.img"] {
            assert!(is_unreal(Path::new(word)));
        }
    }
}
