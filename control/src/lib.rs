//! The words by which a daemon is told what to do and asked what it does: its configuration, by options
//! or by a file, and the lines of its control socket. For programs that start daemons or talk to them.
//!
//! ```
//! use ringway_control::{config, request};
//!
//! # let path = std::env::temp_dir().join(format!("ringway-control-{}.toml", std::process::id()));
//! std::fs::write(
//!     &path,
//!     r#"
//!     [[disk]]
//!     image = "vm.img"
//!     socket = "/run/vm.sock"
//!     queues = 4
//!     "#,
//! )?;
//! // What `ringway serve --config` reads. Mistakes are told with file and line.
//! let plan = config::read(&path)?;
//! assert_eq!((plan.disks.len(), plan.disks[0].queues), (1, 4));
//!
//! // A line of the control socket, as the daemon takes it.
//! let (id, asked) = request::parse(br#"{"command": "pause", "disk": "vm", "id": 7}"#);
//! assert!(matches!(asked, Ok(request::ControlRequest::Pause(_))));
//! assert_eq!(id, Some(7.into()));
//! # std::fs::remove_file(&path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod config;
pub mod log;
pub mod metrics;
pub mod protocol;
pub mod request;
#[cfg(feature = "schema")]
pub mod schema;
pub mod size;
