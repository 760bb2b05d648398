//! Answers browsers. Each client costs itself: requests are small, connections few, and one that has
//! asked for nothing for a while is closed.

use super::address::is_ours;
use super::board::{Board, PageQuestion};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderValue,
    REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::AbortHandle;

/// Connections at a time. For one more, the one that has been silent longest is closed.
const CLIENTS_MAX: usize = 64;
/// How long a connection may go without a request, or with an answer that it does not read.
const SILENT_MAX: Duration = Duration::from_secs(30);
/// How often that is looked at.
const ROUND: Duration = Duration::from_secs(1);
/// The longest head of a request, in bytes.
const HEAD_MAX: usize = 16 << 10;
/// How long to leave the host alone when it has no descriptor for a new client.
const BREATH: Duration = Duration::from_millis(100);

/// Nothing from elsewhere, no script but ours, in nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The parts of the page: path, type, content.
const PARTS: [(&str, &str, &str); 5] = [
    ("/", "text/html; charset=utf-8", include_str!("page.html")),
    ("/page.css", "text/css; charset=utf-8", include_str!("page.css")),
    ("/page.js", "text/javascript; charset=utf-8", include_str!("page.js")),
    ("/charts.js", "text/javascript; charset=utf-8", include_str!("charts.js")),
    ("/icon.svg", "image/svg+xml", include_str!("icon.svg")),
];

/// What is served.
pub(super) struct Site {
    pub(super) board: Arc<Mutex<Board>>,
    /// Names that the page may be asked for under, beside addresses and `localhost`.
    pub(super) names: Vec<String>,
}

/// Where clients come from.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A connection that is there.
struct Client {
    task: AbortHandle,
    /// When it asked last, in milliseconds of `begun`.
    asked: Arc<AtomicU64>,
}

/// Serves until the future is dropped, or `goes_on` says no.
pub(super) async fn serve(listener: Listener, site: Arc<Site>, goes_on: impl Fn() -> bool) {
    let begun = Instant::now();
    let mut clients: Vec<Client> = Vec::new();
    let mut round = tokio::time::interval(ROUND);
    while goes_on() {
        // Both may be dropped in the middle without harm.
        let accepted = tokio::select! {
            accepted = accept(&listener) => accepted,
            _ = round.tick() => {
                tidy(&mut clients, begun);
                continue;
            }
        };
        let Ok(stream) = accepted else {
            tokio::time::sleep(BREATH).await;
            continue;
        };
        make_room(&mut clients);
        let asked = Arc::new(AtomicU64::new(millis(begun)));
        let clock = Clock { begun, asked: Arc::clone(&asked) };
        let task = match stream {
            Stream::Tcp(stream) => tokio::spawn(attend(stream, Arc::clone(&site), clock)),
            Stream::Unix(stream) => tokio::spawn(attend(stream, Arc::clone(&site), clock)),
        };
        clients.push(Client { task: task.abort_handle(), asked });
    }
}

enum Stream {
    Tcp(tokio::net::TcpStream),
    Unix(tokio::net::UnixStream),
}

async fn accept(listener: &Listener) -> io::Result<Stream> {
    Ok(match listener {
        Listener::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            Stream::Tcp(stream)
        }
        Listener::Unix(listener) => Stream::Unix(listener.accept().await?.0),
    })
}

fn millis(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Closes those that have been silent for too long.
fn tidy(clients: &mut Vec<Client>, begun: Instant) {
    let now = millis(begun);
    clients.retain(|client| {
        if u128::from(now.saturating_sub(client.asked.load(Relaxed))) > SILENT_MAX.as_millis() {
            client.task.abort();
        }
        !client.task.is_finished()
    });
}

fn make_room(clients: &mut Vec<Client>) {
    clients.retain(|client| !client.task.is_finished());
    while clients.len() >= CLIENTS_MAX {
        let silent = (0..clients.len()).min_by_key(|&at| clients[at].asked.load(Relaxed));
        let Some(at) = silent else { return };
        clients.swap_remove(at).task.abort();
    }
}

/// When a connection asked last.
struct Clock {
    begun: Instant,
    asked: Arc<AtomicU64>,
}

async fn attend(stream: impl AsyncRead + AsyncWrite + Unpin, site: Arc<Site>, clock: Clock) {
    let answer = service_fn(|request: Request<_>| {
        clock.asked.store(millis(clock.begun), Relaxed);
        let response = site.answer(&request);
        async { Ok::<_, Infallible>(response) }
    });
    // Whatever goes wrong is the client's: it is gone, or speaks no HTTP.
    let _ = http1::Builder::new()
        .max_buf_size(HEAD_MAX)
        // `tidy` does it, for answers as well.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), answer)
        .await;
}

impl Site {
    /// The answer to one request. Its body is not read.
    fn answer<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        let mut response = match self.content(request) {
            Ok((kind, content)) => {
                let mut response = Response::new(Full::new(content));
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
                response
            }
            Err((status, why)) => {
                let mut response = Response::new(Full::from(format!("{why}\n")));
                *response.status_mut() = status;
                let text = HeaderValue::from_static("text/plain; charset=utf-8");
                response.headers_mut().insert(CONTENT_TYPE, text);
                if status == StatusCode::METHOD_NOT_ALLOWED {
                    response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
                }
                response
            }
        };
        for (name, value) in [
            (CACHE_CONTROL, "no-store"),
            (CONTENT_SECURITY_POLICY, POLICY),
            (REFERRER_POLICY, "no-referrer"),
            (X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (X_FRAME_OPTIONS, "DENY"),
            (CROSS_ORIGIN_RESOURCE_POLICY, "same-origin"),
        ] {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }

    fn content<B>(&self, request: &Request<B>) -> Result<(&'static str, Bytes), Refusal> {
        self.judge(request)?;
        let path = request.uri().path();
        if let Some((_, kind, text)) = PARTS.iter().find(|(part, ..)| *part == path) {
            return Ok((kind, Bytes::from_static(text.as_bytes())));
        }
        let json = match path {
            "/data" => {
                let question = question(request.uri().query().unwrap_or(""))
                    .map_err(|why| (StatusCode::BAD_REQUEST, why))?;
                self.lock().answer(question).map(Some)
            }
            "/figures" => self.lock().figures(),
            _ => return Err((StatusCode::NOT_FOUND, "there are / and /figures".into())),
        };
        match json {
            Ok(Some(json)) => Ok(("application/json", json.into())),
            Ok(None) => {
                Err((StatusCode::SERVICE_UNAVAILABLE, "the daemon has not answered yet".into()))
            }
            Err(error) => Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
        }
    }

    /// Whether anything is answered at all.
    fn judge<B>(&self, request: &Request<B>) -> Result<(), Refusal> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let why = "this page is only looked at: GET or HEAD".into();
            return Err((StatusCode::METHOD_NOT_ALLOWED, why));
        }
        let hosts: Vec<_> = request.headers().get_all(HOST).iter().collect();
        let [host] = hosts[..] else {
            return Err((StatusCode::BAD_REQUEST, "a request has one Host".into()));
        };
        // RFC 9112 §3.2.2: a whole URI counts for more than the header. Here both must be ours.
        let named = request.uri().authority().map(hyper::http::uri::Authority::as_str);
        let ours = |host: &str| is_ours(host, &self.names);
        if !host.to_str().is_ok_and(ours) || !named.is_none_or(ours) {
            let why = "this page is not served under that name: use an address or localhost, or \
                       start it with --serve-name NAME"
                .into();
            return Err((StatusCode::MISDIRECTED_REQUEST, why));
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Why something is not answered.
type Refusal = (StatusCode, String);

const CROSS_ORIGIN_RESOURCE_POLICY: hyper::header::HeaderName =
    hyper::header::HeaderName::from_static("cross-origin-resource-policy");

/// `disk=3&since=1700000000000`; both may be left out.
fn question(query: &str) -> Result<PageQuestion, String> {
    let mut question = PageQuestion::default();
    for word in query.split('&').filter(|word| !word.is_empty()) {
        let number = |value: &str| {
            value.parse().map_err(|_| format!("'{value}' is no number: give disk=ID&since=TIME"))
        };
        match word.split_once('=') {
            Some(("disk", value)) => question.disk = Some(number(value)?),
            Some(("since", value)) => question.since = number(value)?,
            _ => return Err(format!("'{word}' is not known: give disk=ID&since=TIME")),
        }
    }
    Ok(question)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_two_numbers() {
        let asked = |query| question(query).map(|question| (question.disk, question.since));
        assert_eq!(asked(""), Ok((None, 0)));
        assert_eq!(asked("disk=3&since=17"), Ok((Some(3), 17)));
        for query in ["disk=", "disk=-1", "disk", "since=1e3", "disk=3&x=1", "disk=%33"] {
            assert!(asked(query).unwrap_err().contains("disk=ID&since=TIME"), "{query}");
        }
    }

    #[test]
    fn the_page_is_small_and_asks_nobody_else_for_anything() {
        let size: usize = PARTS.iter().map(|(.., text)| text.len()).sum();
        assert!(size <= 60 << 10, "{size} bytes");
        for (path, _, text) in PARTS {
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for word in ["http:", "https:", "//cdn", "@import", "innerHTML", "outerHTML", "eval("] {
                assert!(!text.contains(word), "{path}: {word}");
            }
        }
    }
}
