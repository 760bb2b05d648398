//! Namespaces: what has to be known of one before it can be used.

use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What a namespace is, and what its device and the kernel take in one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its identifier at its controller.
    pub id: u32,
    /// A logical block has 2^this bytes.
    pub block_shift: u8,
    /// The most bytes of one transfer, whatever memory it is: a multiple of the block, and 65,536
    /// blocks at most. The kernel does not split these commands, it refuses longer ones.
    pub max_bytes: u32,
    /// The most blocks of one range to deallocate; 0 if the device has no Dataset Management.
    pub discard_blocks: u32,
    /// The most blocks of one Write Zeroes, 65,536 at most; 0 if the device has none.
    pub zero_blocks: u32,
    /// Write Zeroes may give blocks back that then read as zeroes.
    pub deallocates_zeroed: bool,
}

/// A namespace whose generic character device is open.
#[derive(Debug)]
pub struct Namespace {
    /// What is known of it.
    pub facts: Facts,
    /// Its block device: whoever holds it claims it for all the host, and learns its size. Engines hold
    /// it until their last command is done, whatever becomes of the process.
    pub block: File,
}

/// Namespaces by the open files of their character devices.
static NAMESPACES: Mutex<Vec<(Weak<File>, Weak<Namespace>)>> = Mutex::new(Vec::new());

impl Namespace {
    /// From now on engines know what `file` is, as long as the namespace and the file are there.
    #[must_use]
    pub fn of_file(self, file: &Arc<File>) -> Arc<Self> {
        let namespace = Arc::new(self);
        let mut namespaces = namespaces();
        namespaces.retain(|(file, _)| file.strong_count() > 0);
        namespaces.push((Arc::downgrade(file), Arc::downgrade(&namespace)));
        namespace
    }

    /// The namespace whose character device `file` is.
    pub(super) fn of(file: &Arc<File>) -> Option<Arc<Self>> {
        let namespaces = namespaces();
        let here = |(known, _): &&(Weak<File>, _)| known.as_ptr() == Arc::as_ptr(file);
        namespaces.iter().rev().find(here).and_then(|(_, namespace)| namespace.upgrade())
    }
}

fn namespaces() -> MutexGuard<'static, Vec<(Weak<File>, Weak<Namespace>)>> {
    NAMESPACES.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_as_long_as_both_are_there() {
        let open = || File::open("/dev/null").unwrap();
        let (one, other) = (Arc::new(open()), Arc::new(open()));
        let facts = Facts {
            id: 1,
            block_shift: 12,
            max_bytes: 4096,
            discard_blocks: 0,
            zero_blocks: 0,
            deallocates_zeroed: false,
        };
        let namespace = Namespace { facts, block: open() }.of_file(&one);
        assert_eq!(Namespace::of(&one).unwrap().facts, facts);
        assert!(Namespace::of(&other).is_none());
        drop(namespace);
        assert!(Namespace::of(&one).is_none());
    }
}
