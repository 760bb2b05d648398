//! What was copied, in a line or as JSON.

use super::args::Prealloc;
use ringway_control::size::Size;
use serde::Serialize;

/// What was done. The names of the fields are the keys of the JSON and stay as they are.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Summary {
    pub(super) source: String,
    pub(super) destination: String,
    /// `raw` or `qcow2`; of a served disk raw.
    pub(super) from_format: &'static str,
    pub(super) to_format: &'static str,
    /// `zlib` or `zstd`.
    pub(super) compression: Option<&'static str>,
    /// Bytes of disk.
    pub(super) bytes: u64,
    /// Where it went on, of a copy that was resumed.
    pub(super) resumed_at_bytes: u64,
    /// Blocks that both files have now.
    pub(super) shared_bytes: u64,
    pub(super) data_bytes: u64,
    pub(super) zero_bytes: u64,
    /// Bytes of the file of a new qcow2 image.
    pub(super) file_bytes: Option<u64>,
    pub(super) seconds: f64,
    /// It was read back and compared.
    pub(super) verified: bool,
    #[serde(skip)]
    pub(super) prealloc: Prealloc,
}

impl Summary {
    pub(super) fn line(&self) -> String {
        let copied = self.bytes - self.resumed_at_bytes - self.shared_bytes;
        let resumed = match self.resumed_at_bytes {
            0 => String::new(),
            start => format!(", resumed at {}", Size(start)),
        };
        let reserved = match self.prealloc {
            Prealloc::Off => "",
            Prealloc::Falloc => " reserved",
            Prealloc::Full => " written",
        };
        let shared = match self.shared_bytes {
            0 => String::new(),
            shared => format!("  {} shared", Size(shared)),
        };
        let (data, zeroes) = (Size(self.data_bytes), Size(self.zero_bytes));
        let flow = match copied {
            0 if self.bytes > 0 => String::new(),
            copied => format!("  {} copied: {data} data, {zeroes} zeroes{reserved}", Size(copied)),
        };
        let file = match (self.file_bytes, self.compression) {
            (Some(bytes), Some(kind)) => format!("  {} compressed by {kind}", Size(bytes)),
            (Some(bytes), None) => format!("  {} of qcow2", Size(bytes)),
            (None, _) => String::new(),
        };
        // Far below 2^64.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let rate = (copied as f64 / self.seconds.max(1e-3)) as u64;
        let rate = if copied == 0 { String::new() } else { format!("  {}/s", Size(rate)) };
        let verified = if self.verified { ", verified" } else { "" };
        format!(
            "{} to {}{resumed}{shared}{flow}{file}  {:.2} s{rate}{verified}",
            self.source, self.destination, self.seconds
        )
    }
}
