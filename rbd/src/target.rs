//! Names of images: which pool, which of its images, which snapshot of that.

use std::fmt;
use std::str::FromStr;

/// An image of a cluster, or a snapshot of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The pool.
    pub pool: String,
    /// The namespace within the pool; empty for none.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// The snapshot, if one is named.
    pub snapshot: Option<String>,
}

/// Why a word names no image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word}: {why}. Say rbd:POOL/IMAGE, rbd:POOL/NAMESPACE/IMAGE or rbd:POOL/IMAGE@SNAPSHOT")]
pub struct TargetError {
    word: String,
    why: &'static str,
}

impl Target {
    /// The scheme of names of images.
    pub const SCHEME: &'static str = "rbd";
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(word: &str) -> Result<Self, TargetError> {
        let error = |why| TargetError { word: word.to_owned(), why };
        let rest = word.strip_prefix("rbd:").ok_or_else(|| error("it does not begin with rbd:"))?;
        let (name, snapshot) = match rest.split_once('@') {
            Some((name, snapshot)) => (name, Some(snapshot)),
            None => (rest, None),
        };
        let parts: Vec<&str> = name.split('/').collect();
        let (pool, namespace, image) = match parts[..] {
            [pool, image] => (pool, "", image),
            [pool, namespace, image] if !namespace.is_empty() => (pool, namespace, image),
            [_] => return Err(error("it names no image of the pool")),
            _ => return Err(error("it has too many parts, or empty ones")),
        };
        if pool.is_empty() || image.is_empty() || snapshot == Some("") {
            return Err(error("a part of it is empty"));
        }
        if snapshot.is_some_and(|snapshot| snapshot.contains(['@', '/'])) {
            return Err(error("a snapshot has neither @ nor / in its name"));
        }
        if word.contains('\0') || name.contains(':') {
            return Err(error("options are not said in the name: --ceph-conf and --ceph-user are"));
        }
        Ok(Self {
            pool: pool.to_owned(),
            namespace: namespace.to_owned(),
            image: image.to_owned(),
            snapshot: snapshot.map(str::to_owned),
        })
    }
}

/// As it is said.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rbd:{}/", self.pool)?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.image)?;
        self.snapshot.as_ref().map_or(Ok(()), |snapshot| write!(f, "@{snapshot}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ways_to_name_an_image_are_understood() {
        for (word, pool, namespace, image, snapshot) in [
            ("rbd:rbd/vm", "rbd", "", "vm", None),
            ("rbd:rbd/vm@monday", "rbd", "", "vm", Some("monday")),
            ("rbd:p/tenant/vm.1", "p", "tenant", "vm.1", None),
            ("rbd:p/t/i@s", "p", "t", "i", Some("s")),
        ] {
            let target: Target = word.parse().unwrap();
            let found = (target.pool.as_str(), target.namespace.as_str(), target.image.as_str());
            assert_eq!(found, (pool, namespace, image), "{word}");
            assert_eq!(target.snapshot.as_deref(), snapshot, "{word}");
            assert_eq!(target.to_string(), word);
        }
    }

    #[test]
    fn what_names_no_image_is_refused_with_the_reason() {
        for (word, why) in [
            ("rbd:", "no image"),
            ("rbd:vm", "no image"),
            ("rbd:/vm", "is empty"),
            ("rbd:p/", "is empty"),
            ("rbd:p//vm", "too many parts"),
            ("rbd:a/b/c/d", "too many parts"),
            ("rbd:p/vm@", "is empty"),
            ("rbd:p/vm@a@b", "neither @"),
            ("rbd:p/vm@a/b", "neither @"),
            ("rbd:p/vm:id=admin", "--ceph-user"),
            ("nbd:p/vm", "begin with rbd:"),
        ] {
            let error = word.parse::<Target>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{word}: ")) && error.contains(why), "{error}");
        }
    }
}
