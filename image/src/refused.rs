//! Why an image is not opened: what is wrong with it, and what to do.

/// What is wrong with an image, or with the use that was wanted. Who tells it puts the name in front.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// Another format, or none.
    #[error(
        "it is no qcow2 image: it does not begin with QFI\\xfb. A raw one has no tables to check or merge, and is served \
         without --format qcow2"
    )]
    NotQcow2,
    /// A version that nobody has specified, or the first one.
    #[error(
        "it is qcow version {0}; versions 2 and 3 are known. `qemu-img convert` makes one of it"
    )]
    Version(u32),
    /// The header ends before its fields do.
    #[error("its header is cut off: {0} is beyond its end. Restore it from a backup")]
    Truncated(&'static str),
    /// A number that cannot be.
    #[error("its header is damaged: {what} is {value}, but {why}. Restore it from a backup")]
    Field {
        /// The field, by its name in the specification.
        what: &'static str,
        /// What is there.
        value: u64,
        /// What should be there.
        why: &'static str,
    },
    /// What is written would be in plaintext.
    #[error(
        "it is encrypted ({}), which is not supported: it would be written in plaintext. Let QEMU \
         open it, or `qemu-img convert` it to one that is not",
        method(*.0)
    )]
    Encrypted(u32),
    /// Features that nobody here knows and that change what the image means.
    #[error(
        "it needs features that are not known here: {0}. Convert it with the program that made it"
    )]
    UnknownFeatures(String),
    /// Clusters with subclusters.
    #[error(
        "it has extended L2 entries (subclusters), which are not supported. `qemu-img convert -O qcow2 \
         -o extended_l2=off` makes one without"
    )]
    ExtendedL2,
    /// A way to compress that is not known, or two that contradict each other.
    #[error("its compression type {0} is not known; zlib (0) and zstd (1) are")]
    Compression(u8),
    /// Its reference counts may be too low.
    #[error(
        "it was not closed: its reference counts may be wrong (lazy refcounts). `qemu-img check -r all` \
         makes them right, as serving it without --repair never does where nothing else is wrong; with \
         --read-only it can be used as it is"
    )]
    Dirty,
    /// Somebody has found it damaged.
    #[error(
        "it is marked as corrupt, and is only read: with --read-only, or by `ringway copy`. Make a copy of its \
         file, then `qemu-img check -r all` repairs what can be repaired"
    )]
    Corrupt,
    /// Bitmaps that would be wrong after the first write.
    #[error(
        "it has {0} persistent bitmaps (dirty bitmaps for backups), which would be wrong after the first \
         write. Remove them (`qemu-img bitmap --remove`), or use it with --read-only"
    )]
    Bitmaps(u32),
    /// The data is in another file, and nobody says in which.
    #[error("its data is in another file, which it does not name. `qemu-img amend` can name it")]
    NoDataFileName,
    /// More work than its reader was allowed.
    #[error("its tables need more than {0} steps to go through")]
    TooMuch(u64),
}

/// Header field crypt_method.
fn method(number: u32) -> String {
    match number {
        1 => "AES".into(),
        2 => "LUKS".into(),
        other => format!("method {other}"),
    }
}
