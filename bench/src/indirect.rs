//! When requests take indirect tables, as it is said.

/// When requests take indirect tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum IndirectArg {
    /// When more than half of the ring is taken.
    #[default]
    Scarce,
    /// Never.
    Never,
    /// Always.
    Always,
}

impl From<IndirectArg> for ringway_driver::Indirect {
    fn from(when: IndirectArg) -> Self {
        match when {
            IndirectArg::Scarce => Self::WhenScarce,
            IndirectArg::Never => Self::Never,
            IndirectArg::Always => Self::Always,
        }
    }
}
