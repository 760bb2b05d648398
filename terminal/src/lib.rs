//! What people read: the log, which can neither fail nor block whoever writes to it, and what
//! commands print.
//!
//! ```
//! use ringway_terminal::{reasons, short, table};
//!
//! let rows = vec![vec!["randread".to_owned(), short::count(412_345.0)]];
//! let text = table::text(&["load", "IOPS"], rows);
//! assert!(text.contains("randread") && text.contains("412.3 k"));
//!
//! let error = anyhow::anyhow!("permission denied").context("disk.img: cannot open it");
//! assert_eq!(reasons::in_full(&error), "disk.img: cannot open it: permission denied");
//! ```

pub mod logging;
pub mod output;
pub mod reasons;
pub mod short;
pub mod signals;
pub mod table;
