//! One request of a client, and what it is answered. Requests are read by `httparse`.

use super::names::Names;
use super::text::Format;
use std::sync::Arc;

/// The longest request.
pub(super) const REQUEST_MAX: usize = 8 << 10;
/// The most headers of it.
const HEADERS_MAX: usize = 64;

/// What a request asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The rest of it is still to come.
    More,
    /// Metrics; without them, only the head of the answer.
    Metrics { format: Format, head_only: bool },
    /// Something that there is not: the head of the answer, and what it says.
    Other { status: &'static str, says: &'static str, head_only: bool },
}

const PAGE: &str = "<html><head><title>ringway</title></head><body>\
                    <p><a href=\"/metrics\">metrics</a></p></body></html>\n";

/// Judges what has come by now.
pub(super) fn judge(bytes: &[u8], names: &Names) -> Wanted {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < REQUEST_MAX => return Wanted::More,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            let status = "431 Request Header Fields Too Large";
            return Wanted::Other { status, says: "the request is too long\n", head_only: false };
        }
        Err(_) => {
            let status = "400 Bad Request";
            return Wanted::Other { status, says: "this is no HTTP\n", head_only: false };
        }
    }
    let head_only = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => {
            let status = "405 Method Not Allowed\r\nAllow: GET, HEAD";
            return Wanted::Other { status, says: "metrics can only be read\n", head_only: false };
        }
    };
    let hosts = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("host"));
    if !names.include(hosts.map(|header| header.value)) {
        let says = "metrics are not told under that name: use an address or localhost, or start the \
                    daemon with --metrics-name NAME\n";
        return Wanted::Other { status: "421 Misdirected Request", says, head_only };
    }
    let path = request.path.unwrap_or_default();
    match path.split_once('?').map_or(path, |(path, _)| path) {
        "/metrics" => Wanted::Metrics { format: format(request.headers), head_only },
        "/" => Wanted::Other { status: "200 OK", says: PAGE, head_only },
        _ => {
            let says = "there is /metrics, nothing else\n";
            Wanted::Other { status: "404 Not Found", says, head_only }
        }
    }
}

/// Clients that know OpenMetrics say so.
fn format(headers: &[httparse::Header<'_>]) -> Format {
    let accepts = headers.iter().filter(|header| header.name.eq_ignore_ascii_case("accept"));
    let mut words = accepts.filter_map(|header| std::str::from_utf8(header.value).ok());
    match words.any(|word| word.contains("application/openmetrics-text")) {
        true => Format::OpenMetrics,
        false => Format::Plain,
    }
}

/// An answer, in two parts.
pub(super) struct Response {
    pub(super) head: Vec<u8>,
    pub(super) body: Arc<String>,
}

/// The answer to `wanted`; `None` if it is not all there.
pub(super) fn answer(
    wanted: Wanted,
    metrics: &mut dyn FnMut(Format) -> Arc<String>,
) -> Option<Response> {
    let (status, kind, body, head_only) = match wanted {
        Wanted::More => return None,
        Wanted::Metrics { format, head_only } => {
            ("200 OK", format.media_type(), metrics(format), head_only)
        }
        Wanted::Other { status: status @ "200 OK", says, head_only } => {
            (status, "text/html; charset=utf-8", Arc::new(says.to_owned()), head_only)
        }
        Wanted::Other { status, says, head_only } => {
            (status, "text/plain; charset=utf-8", Arc::new(says.to_owned()), head_only)
        }
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\
         X-Content-Type-Options: nosniff\r\n\r\n",
        body.len()
    );
    let body = if head_only { Arc::default() } else { body };
    Some(Response { head: head.into(), body })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(request: &[u8]) -> Wanted {
        judge(request, &Names::Known(vec!["a".into()]))
    }

    fn status(request: &[u8]) -> String {
        let answer =
            answer(judged(request), &mut |format| Arc::new(format!("{format:?}"))).unwrap();
        let head = String::from_utf8(answer.head).unwrap();
        format!("{} {}", head.lines().next().unwrap(), answer.body)
    }

    #[test]
    fn a_request_is_answered_whatever_it_is() {
        for (request, wanted) in [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", "HTTP/1.1 200 OK Plain"),
            ("GET /metrics?x=1 HTTP/1.0\r\n\r\n", "HTTP/1.1 200 OK Plain"),
            (
                "GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text;version=1.0.0\r\n\r\n",
                "HTTP/1.1 200 OK OpenMetrics",
            ),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK "),
            ("GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK <html>"),
            ("GET /metrics HTTP/1.1\r\nhost: b:1\r\n\r\n", "HTTP/1.1 421 Misdirected"),
            ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "HTTP/1.1 421 Misdirected"),
            ("GET /etc/passwd HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
            ("\u{0}\u{1}\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        ] {
            let status = status(request.as_bytes());
            assert!(status.starts_with(wanted), "{request:?}: {status}");
        }
        for path in ["/", "/metrics", "/nothing"] {
            let wanted = judged(format!("HEAD {path} HTTP/1.1\r\n\r\n").as_bytes());
            let answer = answer(wanted, &mut |_| Arc::new("metrics".into())).unwrap();
            assert_eq!(&*answer.body, "", "{path}: an answer to HEAD has no body");
        }
        assert_eq!(judged(b"GET /metrics HTTP/1.1\r\nHost:"), Wanted::More);
        assert_eq!(judged(b""), Wanted::More);
        let many = "GET / HTTP/1.1\r\n".to_owned() + &"a: b\r\n".repeat(65) + "\r\n";
        assert!(status(many.as_bytes()).starts_with("HTTP/1.1 431"));
        let long = "GET /".to_owned() + &"a".repeat(REQUEST_MAX);
        assert!(status(long.as_bytes()).starts_with("HTTP/1.1 431"));
    }
}
