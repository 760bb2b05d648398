//! What `--version` says: besides the version the commit, and what was compiled in. `build.rs` finds
//! out what it was.

/// `ringway -V`.
pub(crate) const SHORT: &str = env!("CARGO_PKG_VERSION");

/// `ringway --version`.
pub(crate) const LONG: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\ncommit: ",
    env!("RINGWAY_COMMIT"),
    "\nfeatures: ",
    env!("RINGWAY_FEATURES"),
    "\nbuild: ",
    env!("RINGWAY_BUILD"),
);
