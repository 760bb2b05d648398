//! Disks that NBD servers export, behind the three verbs of an engine: queue, submit, reap.
//!
//! ```
//! use ringway_aio::{Engine, Io, IoOp, Reaped};
//! use ringway_core::Segment;
//! use ringway_nbd_client::{Nbd, Timeouts, Remote, Target, connect};
//!
//! # use ringway_nbd_words as nbd;
//! # use std::io::{Read, Result, Write};
//! # use std::os::unix::net::{UnixListener, UnixStream};
//! # /// Serves 1 MiB of sevens to one client, which reads only.
//! # fn serve(listener: &UnixListener) -> Result<()> {
//! #     let (mut stream, _) = listener.accept()?;
//! #     stream.write_all(&nbd::NBDMAGIC.to_be_bytes())?;
//! #     stream.write_all(&nbd::IHAVEOPT.to_be_bytes())?;
//! #     stream.write_all(&nbd::FLAG_FIXED_NEWSTYLE.to_be_bytes())?;
//! #     stream.read_exact(&mut [0; 4])?;
//! #     let answer = |stream: &mut UnixStream, option: &[u8], kind: u32, data: &[u8]| {
//! #         let head = [&nbd::OPTION_REPLY_MAGIC.to_be_bytes(), option, &kind.to_be_bytes()];
//! #         let len = (data.len() as u32).to_be_bytes();
//! #         stream.write_all(&[&head.concat(), &len[..], data].concat())
//! #     };
//! #     loop {
//! #         let mut option = [0; 16];
//! #         stream.read_exact(&mut option)?;
//! #         let len = u32::from_be_bytes(option[12..].try_into().unwrap());
//! #         stream.read_exact(&mut vec![0; len as usize])?;
//! #         let option = &option[8..12];
//! #         if option != nbd::option::GO.to_be_bytes() {
//! #             answer(&mut stream, option, nbd::answer::ERR_UNSUP, &[])?;
//! #             continue;
//! #         }
//! #         let (kind, flags) = (nbd::info::EXPORT, nbd::offers::HAS_FLAGS);
//! #         let size = (1u64 << 20).to_be_bytes();
//! #         let export = [&kind.to_be_bytes()[..], &size, &flags.to_be_bytes()].concat();
//! #         answer(&mut stream, option, nbd::answer::INFO, &export)?;
//! #         answer(&mut stream, option, nbd::answer::ACK, &[])?;
//! #         break;
//! #     }
//! #     loop {
//! #         let mut request = [0; 28];
//! #         stream.read_exact(&mut request)?;
//! #         let len = u32::from_be_bytes(request[24..].try_into().unwrap());
//! #         let magic = nbd::SIMPLE_REPLY_MAGIC.to_be_bytes();
//! #         stream.write_all(&[&magic, &[0; 4], &request[8..16]].concat())?;
//! #         stream.write_all(&vec![7; len as usize])?;
//! #     }
//! # }
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("disk.sock");
//! # let listener = UnixListener::bind(&path)?;
//! # std::thread::spawn(move || serve(&listener));
//! # let name = format!("nbd:unix:{}", path.display());
//! // Its name is "nbd:unix:/run/disk.sock" or "nbd://192.0.2.7/disk"; here it has 1 MiB of sevens.
//! let target: Target = name.parse()?;
//! let connected = connect(&target)?;
//! assert_eq!(connected.negotiated.bytes, 1 << 20);
//! let remote = Remote::new("disk", &connected);
//! // When the connection is lost, it comes back like this; requests wait meanwhile.
//! let again = move || Ok(connect(&target)?);
//! remote.supervise(Box::new(again), Timeouts::default())?;
//! let mut engine = Nbd::new(128)?;
//! let file = engine.attach_handle(&connected.socket, &remote.handle())?;
//!
//! let mut page = vec![0u8; 4096];
//! let list = [Segment { base: page.as_mut_ptr(), len: page.len() }];
//! let io = Io { tag: 1, op: IoOp::Read, file, offset: 8192, len: 4096, memory: list[..].into() };
//! // SAFETY: `page` and `list` are not touched until the tag was reaped.
//! unsafe { engine.queue(&io) }.expect("128 are allowed");
//! engine.submit()?;
//! let mut out = Reaped::with_capacity(128, 0);
//! while engine.reap(&mut out) == 0 {
//!     engine.wait(None)?;
//! }
//! assert_eq!((out.done[0].tag, out.done[0].result), (1, 4096));
//! assert!(page.iter().all(|&byte| byte == 7));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `handshake.rs` and `reply.rs` judge what a server says, `connection.rs` is one connection as a worker
//! uses it, `supervisor.rs` has it come back. Engine's threads write to sockets by `pwritev2`: the process has
//! to ignore SIGPIPE, as programs in Rust do.

mod allocation;
mod connect;
mod connection;
mod engine;
mod first_flush;
mod handshake;
mod incoming;
mod ledger;
mod loss;
mod memory;
mod operations;
mod remote;
mod reply;
mod shared;
mod supervisor;
mod table;
mod target;
mod tls;

pub use allocation::{Allocation, AllocationError};
pub use connect::{ConnectError, Connected, connect};
pub use engine::Nbd;
pub use handshake::{HandshakeError, Known, Negotiated};
pub use ledger::Counts;
pub use remote::Remote;
pub use supervisor::{Connect, Timeouts};
pub use target::{Address, Connections, Target, TargetError, Tls};
pub use tls::TlsError;
