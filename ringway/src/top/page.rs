//! `ringway top --serve`: the figures as a page for browsers.
//!
//! A process of its own, which only asks the daemon, as any client of the control socket could.
//! `address.rs` is where it listens, `http.rs` answers browsers, `board.rs` knows what there is to tell;
//! `history.rs` keeps what has been, `heat.rs` sorts latencies into rows, `listen.rs` hears events and
//! `events.rs` puts them into words. The page itself is `page.html`, `page.css`, `page.js` and `charts.js`.

mod address;
mod board;
mod events;
mod heat;
mod history;
mod http;
mod listen;

pub(super) use address::Address;

use super::watch::Watch;
use anyhow::{Context, bail, ensure};
use board::Board;
use http::{Listener, Site};
use rustix::fs::Mode;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often a signal is looked for.
const TICK: Duration = Duration::from_millis(100);

/// What the page is told.
pub(super) struct Serve {
    pub(super) address: Address,
    /// Other machines may connect.
    pub(super) remote: bool,
    /// Names that it may be asked for under.
    pub(super) names: Vec<String>,
    /// How long the past is kept.
    pub(super) past: Duration,
}

/// Serves the page until a signal ends it.
///
/// # Errors
/// One message: the address cannot be listened at, or the host has no thread.
pub(super) fn serve(serve: Serve, socket: PathBuf, every: Duration) -> anyhow::Result<ExitCode> {
    ensure!(
        serve.remote || !serve.address.is_remote(),
        "{}: other machines could connect, and whoever does sees all disks: add --serve-remote if \
         that is meant, or listen at 127.0.0.1",
        serve.address
    );
    let (listener, file) = listen(&serve.address)?;
    let signal = Arc::new(AtomicUsize::new(0));
    for number in ringway_terminal::signals::that_end() {
        signal_hook::flag::register_usize(number, Arc::clone(&signal), usize::try_from(number)?)?;
    }
    let board = Arc::new(Mutex::new(Board::new(&socket, every, serve.past)));
    let place = place(&listener, &serve.address)?;
    let text = format!("{place}\nringway top of {}, until Ctrl-C\n", socket.display());
    let hearing = Arc::clone(&board);
    let hear = move |event| {
        hearing.lock().unwrap_or_else(PoisonError::into_inner).hear_event(event);
    };
    listen::listen(socket.clone(), hear).context("cannot start a thread")?;
    let watch = Watch::start(socket, every).context("cannot start a thread")?;
    let hearing = Arc::clone(&board);
    let hears = std::thread::Builder::new()
        .name("board".into())
        .spawn(move || {
            while let Ok(answer) = watch.answers.recv() {
                hearing.lock().unwrap_or_else(PoisonError::into_inner).hear(answer);
            }
        })
        .context("cannot start a thread")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .context("cannot wait for clients")?;
    ringway_terminal::output::print(&text)?;
    let site = Arc::new(Site { board, names: serve.names });
    runtime.block_on(async {
        let listener = match listener {
            Bound::Tcp(listener) => Listener::Tcp(tokio::net::TcpListener::from_std(listener)?),
            Bound::Unix(listener) => Listener::Unix(tokio::net::UnixListener::from_std(listener)?),
        };
        let signalled = async {
            while signal.load(Relaxed) == 0 {
                tokio::time::sleep(TICK).await;
            }
        };
        tokio::select! {
            () = http::serve(listener, site, || !hears.is_finished()) => {}
            () = signalled => {}
        }
        io::Result::Ok(())
    })?;
    drop(file);
    match signal.load(Relaxed) {
        0 => bail!("the thread that asks the daemon has ended"),
        number => Ok(ExitCode::from(u8::try_from(128 + number).unwrap_or(1))),
    }
}

enum Bound {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A socket's file; dropping it removes the file.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn listen(address: &Address) -> anyhow::Result<(Bound, Option<SocketFile>)> {
    let (bound, file) = match address {
        Address::Tcp(at) => (Bound::Tcp(listen_at(*at)?), None),
        Address::Unix(path) => {
            remove_left_over(path)?;
            // From the first moment only this user can connect. No other thread runs yet.
            let before = rustix::process::umask(Mode::from_raw_mode(0o177));
            let listener = UnixListener::bind(path);
            rustix::process::umask(before);
            let listener =
                listener.with_context(|| format!("cannot listen at {}", path.display()))?;
            (Bound::Unix(listener), Some(SocketFile(path.clone())))
        }
    };
    match &bound {
        Bound::Tcp(listener) => listener.set_nonblocking(true)?,
        Bound::Unix(listener) => listener.set_nonblocking(true)?,
    }
    Ok((bound, file))
}

fn listen_at(at: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(at).with_context(|| match at.port() {
        0 => format!("cannot listen at {at}"),
        _ => format!("cannot listen at {at} (port 0 takes any that is free)"),
    })
}

/// A socket's file that nobody listens at is in the way; anything else is somebody's.
fn remove_left_over(path: &Path) -> anyhow::Result<()> {
    let Ok(found) = path.symlink_metadata() else { return Ok(()) };
    ensure!(
        found.file_type().is_socket(),
        "{}: there is a file, and it is no socket",
        path.display()
    );
    match crate::ctl::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => bail!("{}: somebody listens there already", path.display()),
    }
}

/// What a browser is to open.
fn place(listener: &Bound, address: &Address) -> anyhow::Result<String> {
    Ok(match listener {
        // Of port 0 only the listener knows.
        Bound::Tcp(listener) => format!("http://{}/", listener.local_addr()?),
        Bound::Unix(_) => address.to_string(),
    })
}
