//! TLS of NBD connections, for servers and clients alike: PEM files, and a relay that has the keys of a
//! connection, so that who moves data has a plain socket and neither waits for TLS nor knows a key.

mod pem;
mod relay;
mod wire;

pub use pem::{FileError, certificates, key};
pub use relay::{FAREWELL, Peer, start};
pub use wire::Wire;
