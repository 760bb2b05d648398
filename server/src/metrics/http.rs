//! One request of a client, and what it is answered. Requests are read by `httparse`.

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
    Other { status: &'static str, says: &'static str },
}

const PAGE: &str = "<html><head><title>ringway</title></head><body>\
                    <p><a href=\"/metrics\">metrics</a></p></body></html>\n";

/// Judges what has come by now.
pub(super) fn judge(bytes: &[u8]) -> Wanted {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < REQUEST_MAX => return Wanted::More,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            let status = "431 Request Header Fields Too Large";
            return Wanted::Other { status, says: "the request is too long\n" };
        }
        Err(_) => return Wanted::Other { status: "400 Bad Request", says: "this is no HTTP\n" },
    }
    let head_only = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => {
            let status = "405 Method Not Allowed\r\nAllow: GET, HEAD";
            return Wanted::Other { status, says: "metrics can only be read\n" };
        }
    };
    let path = request.path.unwrap_or_default();
    match path.split_once('?').map_or(path, |(path, _)| path) {
        "/metrics" => Wanted::Metrics { format: format(request.headers), head_only },
        "/" => Wanted::Other { status: "200 OK", says: PAGE },
        _ => Wanted::Other { status: "404 Not Found", says: "there is /metrics, nothing else\n" },
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
pub(super) struct Answer {
    pub(super) head: Vec<u8>,
    pub(super) body: Arc<str>,
}

/// The answer to `wanted`; `None` if it is not all there.
pub(super) fn answer(
    wanted: Wanted,
    metrics: &mut dyn FnMut(Format) -> Arc<str>,
) -> Option<Answer> {
    let (status, kind, body, head_only) = match wanted {
        Wanted::More => return None,
        Wanted::Metrics { format, head_only } => {
            ("200 OK", format.media_type(), metrics(format), head_only)
        }
        Wanted::Other { status: status @ "200 OK", says } => {
            (status, "text/html; charset=utf-8", says.into(), false)
        }
        Wanted::Other { status, says } => (status, "text/plain; charset=utf-8", says.into(), false),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\
         X-Content-Type-Options: nosniff\r\n\r\n",
        body.len()
    );
    let body = if head_only { "".into() } else { body };
    Some(Answer { head: head.into(), body })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(request: &[u8]) -> String {
        let answer = answer(judge(request), &mut |format| format!("{format:?}").into()).unwrap();
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
            ("GET /etc/passwd HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
            ("\u{0}\u{1}\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        ] {
            let status = status(request.as_bytes());
            assert!(status.starts_with(wanted), "{request:?}: {status}");
        }
        assert_eq!(judge(b"GET /metrics HTTP/1.1\r\nHost:"), Wanted::More);
        assert_eq!(judge(b""), Wanted::More);
        let many = "GET / HTTP/1.1\r\n".to_owned() + &"a: b\r\n".repeat(65) + "\r\n";
        assert!(status(many.as_bytes()).starts_with("HTTP/1.1 431"));
        let long = "GET /".to_owned() + &"a".repeat(REQUEST_MAX);
        assert!(status(long.as_bytes()).starts_with("HTTP/1.1 431"));
    }
}
