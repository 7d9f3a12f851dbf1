// Writing JSON: the plan of a call, and what is compiled.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "problem.hpp"

namespace flash_cute {

class JsonObject {
 public:
  JsonObject& add(char const* key, std::string const& text) { return add_raw(key, '"' + text + '"'); }
  JsonObject& add(char const* key, char const* text) { return add(key, std::string(text)); }
  template <class Number>
  JsonObject& add(char const* key, Number number) {
    std::ostringstream text;
    text.precision(9);
    text << number;
    return add_raw(key, text.str());
  }
  JsonObject& add(char const* key, std::optional<int64_t> number) {
    return number ? add(key, *number) : add_raw(key, "null");
  }
  JsonObject& add(char const* key, std::vector<std::string> const& texts) {
    std::string list;
    for (std::string const& text : texts) list += (list.empty() ? "\"" : ", \"") + text + '"';
    return add_raw(key, '[' + list + ']');
  }
  JsonObject& add_raw(char const* key, std::string const& json) {
    body_ += (body_.empty() ? "\"" : ", \"") + std::string(key) + "\": " + json;
    return *this;
  }
  std::string text() const { return '{' + body_ + '}'; }

 private:
  std::string body_;
};

// What plans of all devices tell of the problem.
inline JsonObject& add_problem(JsonObject& plan, AttentionProblem const& problem) {
  return plan.add("head_dim", problem.shape.head_dim)
      .add("head_dim_v", problem.shape.head_dim_v)
      .add("softmax_scale", problem.softmax_scale)
      .add("window_left", problem.window_left)
      .add("window_right", problem.window_right);
}

}  // namespace flash_cute
