//! Chat templates against Jinja2 itself; see `tests/data/make_expected.py`.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use snowmelt_text::{ChatTemplate, Message, RenderOptions, TextError};

fn data(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    std::fs::read_to_string(path.join(name)).unwrap()
}

fn data_json(name: &str) -> Value {
    serde_json::from_str(&data(name)).unwrap()
}

/// The time that `make_expected.py` froze, a Sunday afternoon.
fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_741_529_107)
}

/// The outcome in the form of `expected.json`.
fn outcome(result: Result<String, TextError>) -> Value {
    match result {
        Ok(text) => json!({ "text": text }),
        Err(TextError::TemplateRaised { message, .. }) => json!({ "raised": message }),
        Err(TextError::TemplateSyntax { line, .. }) => json!({ "syntax_error": line }),
        Err(error) => json!({ "error": error.to_string() }),
    }
}

/// Errors other than raised ones differ in words.
fn agrees(got: &Value, expected: &Value) -> bool {
    got == expected || got.get("error").is_some() && expected.get("error").is_some()
}

#[test]
fn snippets_render_as_in_jinja2() {
    let snippets = data_json("snippets.json");
    let expected = &data_json("expected.json")["snippets"];
    let mut wrong = Vec::new();
    for (index, snippet) in snippets.as_array().unwrap().iter().enumerate() {
        let source = snippet["template"].as_str().unwrap();
        let options = RenderOptions {
            kwargs: snippet["variables"].as_object().cloned().unwrap_or_default(),
            now: Some(now()),
            ..RenderOptions::default()
        };
        let result = ChatTemplate::from_source(source, "snippet")
            .and_then(|template| template.render(&[], &options));
        let got = outcome(result);
        if !agrees(&got, &expected[index]) {
            wrong.push(format!("{source}\n  got {got}\n  not {}", expected[index]));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A case of `cases.json` as arguments of `render`.
fn arguments(case: &Value) -> (Vec<Message>, RenderOptions) {
    let list = |key: &str| case.get(key).map(|list| list.as_array().unwrap().clone());
    let options = RenderOptions {
        tools: list("tools"),
        documents: list("documents"),
        kwargs: case["kwargs"].as_object().cloned().unwrap_or_default(),
        now: Some(now()),
        ..RenderOptions::default()
    };
    let messages = serde_json::from_value(case["messages"].clone()).unwrap();
    (messages, options)
}

#[test]
fn conversations_render_as_in_jinja2() {
    let cases = data_json("cases.json");
    let expected = &data_json("expected.json")["cases"];
    let mut wrong = Vec::new();
    for case in cases.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let source = data(&format!("templates/{}", case["template"].as_str().unwrap()));
        let mut template = ChatTemplate::from_source(&source, name).unwrap();
        for (token, text) in case["special_tokens"].as_object().into_iter().flatten() {
            template = template.with_special_token(token, text.as_str().unwrap());
        }
        let (messages, options) = arguments(case);
        let got = outcome(template.render(&messages, &options));
        if !agrees(&got, &expected[name]) {
            wrong.push(format!("{name}\n  got {got}\n  not {}", expected[name]));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn render(source: &str) -> Result<String, TextError> {
    let template = ChatTemplate::from_source(source, "t")?;
    template.render(&[Message::new("user", "x")], &RenderOptions::default())
}

/// Templates come with models from anywhere: none may hang, exhaust memory or overflow the stack.
#[test]
fn hostile_templates_end_with_an_error() {
    let deep = "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}\
                {% endfor %}";
    let wide = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}\
                {% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    let cases = [
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}".into(),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(),
        "{{ 'x' * 999999999999 }}".into(),
        "{{ '%999999999d' | format(1) }}".into(),
        "{{ '{:999999999}'.format(1) }}".into(),
        "{{ range(99999999999) | list }}".into(),
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}\
         {% endfor %}{{ ns.x | length }}"
            .into(),
        format!("{deep}{{{{ ns.x | tojson }}}}"),
        format!("{deep}{{{{ ns.x }}}}"),
        format!("{wide}{{{{ ns.x | tojson }}}}"),
        format!("{wide}{{{{ ns.x }}}}"),
        format!("{wide}{{{{ ns.x | string }}}}"),
        "{{ [1] | tojson(indent=99999999999999999999) }}".into(),
        "{% include 'x' %}".into(),
        "{% extends 'chat_template' %}".into(),
        "{{ x.y }}".into(),
    ];
    for source in &cases {
        let short: String = source.chars().take(70).collect();
        assert!(render(source).is_err(), "{short}");
    }
}

/// Whether these render or are refused does not matter.
#[test]
fn deep_sources_do_not_overflow_the_stack() {
    for source in [
        format!("{{{{ {}1 }}}}", "not ".repeat(50_000)),
        format!("{{{{ {}1 }}}}", "-".repeat(50_000)),
        format!("{{{{ {}1{} }}}}", "(".repeat(5_000), ")".repeat(5_000)),
        format!("{{{{ {}1{} }}}}", "[".repeat(5_000), "]".repeat(5_000)),
        "{% if true %}".repeat(20_000) + &"{% endif %}".repeat(20_000),
        "{% for x in [1] %}".repeat(20_000),
        "{% set x = [x] %}".repeat(100_000),
    ] {
        let _ = render(&source);
    }
}

#[test]
fn a_very_long_conversation_is_within_the_limit() {
    let template = ChatTemplate::from_source(&data("templates/thinking.jinja"), "t").unwrap();
    let messages: Vec<Message> = (0..10_000)
        .map(|i| Message::new(["user", "assistant"][i % 2], "word ".repeat(400)))
        .collect();
    let text = template.render(&messages, &RenderOptions::default()).unwrap();
    assert!(text.len() > 20_000_000);
}

fn discover(config: &str, jinja: Option<&str>) -> Result<ChatTemplate, TextError> {
    ChatTemplate::discover(Some(config.as_bytes()), jinja.map(str::as_bytes))
}

#[test]
fn templates_are_found_in_both_places() {
    let options = |tools: Option<Vec<Value>>| RenderOptions { tools, ..RenderOptions::default() };
    let string = r#"{"chat_template": "config {{ bos_token }}", "bos_token": "<s>"}"#;
    let list = r#"{"bos_token": {"content": "<b>", "lstrip": false}, "eos_token": null,
        "chat_template": [{"name": "tool_use", "template": "tools {{ bos_token }}"},
        {"name": "rag", "template": "{{"}, {"name": "default", "template": "plain"}]}"#;
    let cases = [
        (discover(string, None), None, "config <s>"),
        (discover(string, Some("file {{ bos_token }}")), None, "file <s>"),
        (discover(list, None), None, "plain"),
        (discover(list, None), Some(vec![]), "tools <b>"),
        (discover(list, Some("{{ eos_token is defined }}")), None, "False"),
        (ChatTemplate::discover(None, Some(b"alone")), None, "alone"),
    ];
    for (template, tools, expected) in cases {
        let text = template.unwrap().render(&[], &options(tools)).unwrap();
        assert_eq!(text, expected);
    }
    assert_eq!(discover(string, None).unwrap().special_token("bos_token"), Some("<s>"));
}

#[test]
fn broken_configurations_name_the_field() {
    let cases = [
        ("{", "line 1"),
        ("[]", "an object"),
        ("{}", "no chat template"),
        (r#"{"chat_template": null}"#, "no chat template"),
        (r#"{"chat_template": []}"#, "no chat template"),
        (r#"{"chat_template": 5}"#, "`chat_template` is the number `5`"),
        (r#"{"chat_template": [{"name": "rag", "template": ""}]}"#, "[\"rag\"]"),
        (r#"{"chat_template": [{"name": "rag"}]}"#, "`chat_template[0].template` is null"),
        (r#"{"chat_template": [7]}"#, "`chat_template[0].name` is null"),
        (r#"{"chat_template": "", "bos_token": 1}"#, "`bos_token` is the number `1`"),
        (r#"{"chat_template": "", "eos_token": {}}"#, "`eos_token.content` is null"),
        (r#"{"chat_template": "a\n{% if %}"}"#, "chat_template`, line 2"),
    ];
    for (config, expected) in cases {
        let message = discover(config, None).unwrap_err().to_string();
        assert!(message.contains(expected), "{config}: {message}");
    }
    let error = ChatTemplate::discover(None, Some(b"a\n\xff")).unwrap_err();
    assert!(error.to_string().contains("line 2"), "{error}");
    let error = ChatTemplate::discover(None, None).unwrap_err();
    assert!(matches!(error, TextError::TemplateMissing), "{error}");
}

#[test]
fn messages_keep_null_apart_from_absence() {
    let template = "{% for m in messages %}{{ m.content is defined }} {{ m.content is none }} \
                    {{ m.name }};{% endfor %}";
    let template = ChatTemplate::from_source(template, "t").unwrap();
    let json = r#"[{"role": "a", "content": null, "name": "n"}, {"role": "b"}]"#;
    let messages: Vec<Message> = serde_json::from_str(json).unwrap();
    assert_eq!(
        serde_json::to_value(&messages).unwrap(),
        serde_json::from_str::<Value>(json).unwrap()
    );
    let text = template.render(&messages, &RenderOptions::default()).unwrap();
    assert_eq!(text, "True True n;False False ;");
}

#[test]
fn options_become_variables() {
    let template = "{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }} \
                    {{ enable_thinking is defined }} {{ enable_thinking }} {{ bos_token }}";
    let template = ChatTemplate::from_source(template, "t").unwrap();
    let plain = template.render(&[], &RenderOptions::default()).unwrap();
    assert_eq!(plain, "False True True False  ");
    let options = RenderOptions {
        add_generation_prompt: true,
        tools: Some(vec![]),
        documents: Some(vec![json!({})]),
        enable_thinking: Some(false),
        kwargs: json!({"bos_token": "mine"}).as_object().unwrap().clone(),
        now: None,
    };
    let template = template.with_special_token("bos_token", "<s>");
    assert_eq!(template.render(&[], &options).unwrap(), "True False False True False mine");
}
